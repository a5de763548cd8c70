"""From the settings of an engine to its tiers, or to a sentence that says why they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...engine_config import EngineConfig
from ..pools import MlaPools
from .connector import Connector
from .disk import DiskTier
from .fingerprint import fingerprint
from .host import HostTier
from .offload import Offload
from .pool_io import PoolIO, Pools

if TYPE_CHECKING:
    from ..cache import Cache

log = logging.getLogger(__name__)

DEFAULT_DISK_BYTES = 8 << 30
MOST_PINNED = 128  # blocks
HEADER_BYTES = 1024  # about, of a file


def build_tiers(
    config: EngineConfig,
    cache: Cache,
    pools: Pools,
    model_config: object,
    weights: Iterable[tuple[str, Tensor]],
    draft_pools: Sequence[MlaPools] = (),
    on_ready: Callable[[], None] = lambda: None,
) -> Connector | None:
    """The tiers that ``config`` asks for, below ``pools``; None when it asks for none.

    weights: all that the contents of the pools depend on, the draft model's too. on_ready: see
    :class:`Offload`. Raises ValueError for a tier that does not hold one block, and for a folder that cannot
    be used.
    """
    if not config.offload_host_bytes and config.offload_dir is None:
        return None
    unit = cache.grid.unit
    io = PoolIO(pools, unit, draft_pools)
    host_bytes, disk_bytes = config.offload_host_bytes, config.offload_disk_bytes or DEFAULT_DISK_BYTES
    least = io.nbytes("pages") + io.nbytes("state")
    wrong = [f"offload_host_bytes={host_bytes:,}"] if 0 < host_bytes < least else []
    if config.offload_dir is not None and disk_bytes < least + 2 * HEADER_BYTES:
        wrong.append(f"offload_disk_bytes={disk_bytes:,}")
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)}: one block of {unit} tokens with its state takes {least:,} B; give more"
        )
    disk = None
    if config.offload_dir is not None:
        name = fingerprint(weights, model_config, io.geometry)
        disk = DiskTier(config.offload_dir, disk_bytes, name, max(io.nbytes("pages"), io.nbytes("state")))
        log.info(
            "offload: %s holds %d entries of this model, %s B of all, at most %s B",
            *(disk.folder, len(disk), f"{disk.bytes:,}", f"{disk_bytes:,}"),
        )
    pinned = max(1, min(MOST_PINNED, cache.pages.size // io.pages_per_block // 4))
    host = HostTier(host_bytes) if host_bytes else None
    return Connector(cache, Offload(io, unit, host, disk, queue=pinned, on_ready=on_ready))

"""From a draft's folder to a filled DSparkModel, and from a DSparkModel to the tensors of a file.

    DIR/draft/config.json          read against the target's configuration
    DIR/draft/model.safetensors    headers first, then each tensor into its parameter

The shared embedding is checked by its header and not read: the target's is used.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..config import K3Config
from ..parallel.ranks import Ranks
from ..parallel.sharding import DRAFT
from ..safetensors_dir import SafetensorsDir
from ..weights import CheckpointError, Report, compare, fill
from .dspark_config import DSparkConfig
from .dspark_layout import SHARED, entries
from .dspark_model import DSparkModel

FOLDER = "draft"  # under the target's


def has_draft(path: str | Path) -> bool:
    """Whether a checkpoint brings a draft along."""
    return (Path(path) / FOLDER / "config.json").is_file()


def load_draft(
    path: str | Path,
    target: K3Config,
    dtype: torch.dtype = torch.float32,
    resident: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ranks: Ranks | None = None,
    report: Report | None = None,
) -> DSparkModel:
    """The draft in the folder ``path`` for a target of this configuration, in the target's dtypes.

    The target has to be made with ``tap_layers=draft.config.target_layer_ids`` and the same ``ranks``; each
    reads its own part. report: is told how many of the bytes to read are in the model. Raises ConfigError or
    CheckpointError (both ValueError) listing all that is wrong, ValueError for what ranks cannot divide.
    """
    path = Path(path)
    config = DSparkConfig.from_file(path, target)
    files = SafetensorsDir(path)
    wanted = {entry.name: entry for entry in entries(config)}
    problems = files.problems + compare(files, target, wanted)
    if problems:
        raise CheckpointError(path, problems)
    model = DSparkModel(config, dtype, device, resident, ranks)
    del wanted[SHARED]
    problems = fill(model, files, wanted, DRAFT, report)
    if problems:
        raise CheckpointError(path, problems)
    return model


def tensors_of(model: DSparkModel, embed_tokens: Tensor) -> dict[str, Tensor]:
    """The file's tensors of a whole draft; ``embed_tokens`` [V, D] is the target's."""
    assert model.place.ranks.size == 1
    parameters = dict(model.named_parameters())
    found = {}
    for entry in entries(model.config):
        values = embed_tokens if entry.name == SHARED else parameters[entry.parameter]
        values = values if entry.index is None else values[entry.index]
        found[entry.name] = values.detach().to("cpu", entry.dtype).reshape(entry.shape).contiguous()
    return found

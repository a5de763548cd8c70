"""Copies between the pools and entries: the pages of a block over all layers, the state of a slot over all.

    entry "pages"   latents [L, P, page_size, row]   P pages of a block, L layers of latents
                    draft   [Ld, P, page_size, row]  the draft model's, when it has any
    entry "state"   state   [Lk, H, V, K]            of the recurrent layers
                    window  [Lk, 3, C]

Records of verify steps are not part of a state: they are worth nothing after their step. Reading may happen
on any thread while others' pages and slots are written; writing is the engine thread's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..pools import KdaPools, MlaPools
from .entry import Declined, Entry, Kind

Pools = Sequence[KdaPools | MlaPools]


class PoolIO:
    """Reads and writes the ``pools`` of a model and those of its draft model, ``unit`` tokens a block.

    Raises ValueError when a layer is unlike the others of its kind, a kind is missing, or a block is not
    whole pages.
    """

    def __init__(self, pools: Pools, unit: int, draft_pools: Sequence[MlaPools] = ()) -> None:
        kda = [layer for layer in pools if isinstance(layer, KdaPools)]
        mla = [layer for layer in pools if isinstance(layer, MlaPools)]
        if not kda or not mla:
            raise ValueError("offload needs a model that has both latent pages and recurrent states")
        self._paged = {"latents": [layer.pages for layer in mla]}
        if draft_pools:
            self._paged["draft"] = [layer.pages for layer in draft_pools]
        self._slotted = {"state": [k.state for k in kda], "window": [k.window for k in kda]}
        for name, layers in (self._paged | self._slotted).items():
            if len({(t.dtype, t.shape[1:], t.device) for t in layers}) > 1:
                raise ValueError(f"offload needs the {name} of all layers to be alike")
        page_size = mla[0].pages.shape[1]
        if unit < 1 or unit % page_size:
            raise ValueError(f"a block of {unit} tokens is no whole number of pages of {page_size} tokens")
        self.pages_per_block = unit // page_size
        self.device = mla[0].pages.device
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def geometry(self) -> str:
        """Names, dtypes and shapes of what is stored: who reads must have the same."""
        shapes = {kind: self.shapes(kind) for kind in ("pages", "state")}
        return f"{self.pages_per_block} pages a block; {shapes}"

    def shapes(self, kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of the tensors of an entry."""
        if kind == "state":
            return {n: ((len(ts), *ts[0].shape[1:]), ts[0].dtype) for n, ts in self._slotted.items()}
        pages = self.pages_per_block
        return {n: ((len(ts), pages, *ts[0].shape[1:]), ts[0].dtype) for n, ts in self._paged.items()}

    def nbytes(self, kind: Kind) -> int:
        """Bytes of an entry."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes(kind).values())

    def check(self, kind: Kind, entry: Entry) -> None:
        """Raise :class:`Declined` (foreign) for tensors that do not belong into these pools."""
        given = {name: (tuple(t.shape), t.dtype) for name, t in entry.items()}
        if given != self.shapes(kind):
            raise Declined("foreign", f"it holds {given}, and the pools {self.shapes(kind)}")

    def fence(self) -> torch.cuda.Event | None:
        """A mark behind everything the engine thread has asked of the device so far; None on a CPU."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read_pages(self, pages: Sequence[int], after: torch.cuda.Event | None = None) -> Entry:
        """Copy the pages of one block to the host. after: a fence behind what wrote them."""
        assert len(pages) == self.pages_per_block, f"{len(pages)} pages, {self.pages_per_block} a block"
        rows = torch.tensor(list(pages), dtype=torch.int64)
        return self._read(self._paged, rows, after)

    def read_state(self, slot: int, after: torch.cuda.Event | None = None) -> Entry:
        """Copy the state in one slot to the host."""
        entry = self._read(self._slotted, torch.tensor([slot]), after)
        return {name: tensor.squeeze(1) for name, tensor in entry.items()}

    def write_pages(self, pages: Sequence[int], entry: Entry) -> None:
        """Put latents [L, P, page_size, row] into any number of pages, in order."""
        rows = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        for name, layers in self._paged.items():
            given = entry[name].to(self.device)
            assert given.shape[:2] == (len(layers), len(rows)), f"{name}: {tuple(given.shape)}"
            for layer, latents in zip(layers, given):
                layer.index_copy_(0, rows, latents)

    def write_state(self, slot: int, entry: Entry) -> None:
        """Put a state into a slot."""
        for name, layers in self._slotted.items():
            for layer, value in zip(layers, entry[name].to(self.device)):
                layer[slot] = value

    def _read(self, pools: dict[str, list[Tensor]], rows: Tensor, after: torch.cuda.Event | None) -> Entry:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if self._side is not None:
                stack.enter_context(torch.cuda.stream(self._side))
                if after is not None:
                    self._side.wait_event(after)
            rows = rows.to(self.device)
            return {
                name: torch.stack([t.index_select(0, rows) for t in layers]).cpu().contiguous()
                for name, layers in pools.items()
            }


def join_blocks(blocks: Sequence[Entry]) -> Entry:
    """The pages of consecutive blocks as one entry, for :meth:`PoolIO.write_pages`."""
    return {name: torch.cat([block[name] for block in blocks], 1) for name in blocks[0]}

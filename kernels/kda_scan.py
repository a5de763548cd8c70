"""KDA for models without slot pools: a batch of equally long sequences, the state handed in and handed back.

    sequence 0  |0 .......... 63|64 ..... T-1|      initial[0] -> final[0]
    sequence 1  |0 .......... 63|64 ..... T-1|      initial[1] -> final[1]        pool[site, b] after m tokens

The sequences are rows of one ragged batch to kda.py, and every sequence is a slot of its own.
B sequences, T tokens of each, H heads, K and V key and value channels; states are [V, K].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .kda import forward
from .kda_chunk import Inputs
from .op import op
from .samples import Draw, gapped


@op(opaque=True)
def kda_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Run B sequences from their states.  -> o [B, T, H, V] in v's dtype, final [B, H, V, K] acc.

    q, k [B, T, H, K] normalised and q scaled, v [B, T, H, V], g [B, T, H, K] acc log decay,
    beta [B, T, H] acc, initial [B, H, V, K] acc. T may be 0: the state is handed back as it came.
    """
    final, out = fresh(initial), v.new_empty(v.shape)
    run([q, k, v, g, beta], final, out)
    return out, final


def fresh(initial: Tensor) -> Tensor:
    """A copy to advance, which is never the op's input."""
    return initial.clone(memory_format=torch.contiguous_format)


def run(sequences: list[Tensor], states: Tensor, out: Tensor) -> None:
    """Advance states [B, H, V, K] in place over five [B, T, ..] tensors, and write out [B, T, H, V]."""
    count, tokens = out.shape[:2]
    rows = Inputs(*(x.flatten(0, 1) for x in sequences))
    bounds = [b * tokens for b in range(count + 1)]
    forward(rows, states, torch.arange(count), bounds, out.flatten(0, 1), 0)


@kda_scan.fake
def _(q, k, v, g, beta, initial) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), initial.new_empty(initial.shape)


@kda_scan.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    yield from scan_samples(dtype)


SAMPLES = ((0, 5), (2, 0), (1, 1), (3, 1), (2, 12), (2, 70), (1, 130))  # sequences, tokens


def scan_samples(dtype: torch.dtype) -> Iterator[tuple]:
    """Arguments of kda_scan; every second one is cut from one projection, from a state with gaps."""
    draw, heads, keys, values = Draw(dtype), 3, 20, 12
    for i, (count, tokens) in enumerate(SAMPLES):
        shape = (count, tokens, heads)
        q, k, v = draw.unit(*shape, keys) * keys**-0.5, draw.unit(*shape, keys), draw.normal(*shape, values)
        g = -(5.0 if i % 3 else 30.0) * draw.fraction(*shape, keys) ** 2
        initial = draw.normal_acc(count, heads, values, keys)
        if i % 2:
            packed = torch.cat([x.flatten(2) for x in (q, k, v)], 2).split(
                [heads * keys] * 2 + [heads * values], 2
            )
            q, k, v = (piece.view(x.shape) for piece, x in zip(packed, (q, k, v)))
            initial = gapped(initial).mT.contiguous().mT
        yield q, k, v, g, draw.fraction(*shape), initial


@op(writes=("pool",), opaque=True)
def kda_scan_export(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor,
    export_offset: Tensor,
    pool: Tensor,
    site: int,
) -> tuple[Tensor, Tensor]:
    """kda_scan, and the states on the way: pool[site, b] gets the state after export_offset[b] tokens.

    export_offset [N] int32, N >= B, entry b for sequence b, 0 for none; pool(a!) [sites, N, H, V, K] acc.
    The state is that of a run that stops there; the results are those of kda_scan, bit for bit.
    Raises ValueError for an offset that is negative or past the T tokens.
    """
    offsets = checked_offsets(export_offset, q.shape[0], q.shape[1])
    out, final = kda_scan.meaning(q, k, v, g, beta, initial)
    for m in sorted(set(offsets) - {0}):
        at = torch.tensor([b for b, offset in enumerate(offsets) if offset == m], device=q.device)
        part = [x[:, :m].index_select(0, at) for x in (q, k, v, g, beta)]
        states = initial.index_select(0, at)
        run(part, states, torch.empty_like(part[2]))
        pool[site].index_copy_(0, at, states.to(pool.dtype))
    return out, final


def checked_offsets(export_offset: Tensor, count: int, tokens: int) -> list[int]:
    """The offsets of ``count`` sequences of ``tokens`` tokens. Raises ValueError for one out of range."""
    if len(export_offset) < count:
        raise ValueError(
            f"{len(export_offset)} export offsets for a batch of {count}: one a sequence, 0 for none"
        )
    offsets = export_offset.tolist()[:count]
    for b, offset in enumerate(offsets):
        if not 0 <= offset <= tokens:
            raise ValueError(
                f"export offset {offset} of sequence {b}, which has {tokens} tokens here: "
                f"allowed are 1 to {tokens}, and 0 for none"
            )
    return offsets


@kda_scan_export.fake
def _(q, k, v, g, beta, initial, export_offset, pool, site) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), initial.new_empty(initial.shape)


@kda_scan_export.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for i, args in enumerate(scan_samples(dtype)):
        count, tokens = args[0].shape[:2]
        offsets = [(7 * b + 64) % (tokens + 1) for b in range(count)] + [0] * 2
        pool = args[5].new_full((3, count + 2, *args[5].shape[1:]), 7.0)
        yield *args, torch.tensor(offsets, dtype=torch.int32), pool, i % 3

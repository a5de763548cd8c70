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

from .exports import offsets_of
from .kda import forward
from .kda_chunk import Inputs
from .kda_export import forward_export
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
    bounds, out = bounds_of(v), v.new_empty(v.shape)
    states = initial.clone(memory_format=torch.contiguous_format)
    forward(as_rows(q, k, v, g, beta), states, torch.arange(len(states)), bounds, out.flatten(0, 1), 0)
    return out, states


def bounds_of(v: Tensor) -> list[int]:
    """Where the sequences of v [B, T, ..] begin and end as rows of one ragged batch."""
    count, tokens = v.shape[:2]
    return [b * tokens for b in range(count + 1)]


def as_rows(*sequences: Tensor) -> Inputs:
    """q, k, v, g and beta [B, T, ..] -> [B * T, ..]."""
    return Inputs(*(x.flatten(0, 1) for x in sequences))


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
    """kda_scan, bit for bit, and checkpoints: pool[site, b] gets the state after export_offset[b] tokens.

    export_offset [N] int32, entry b for sequence b, 0 for none; pool(a!) [sites, N, H, V, K] acc. The state
    has the bits that kda_prefill_export promises. Raises ValueError, before anything is written, for an
    offset that is negative or past the T tokens.
    """
    bounds, out = bounds_of(v), v.new_empty(v.shape)
    exported = [b for b, offset in enumerate(offsets_of(export_offset, bounds)) if offset]
    count, rows = len(bounds) - 1, as_rows(q, k, v, g, beta)
    slots = torch.arange(count)
    checkpoint = slots.new_zeros(len(export_offset))
    checkpoint[exported] = torch.arange(count, count + len(exported))
    states = torch.cat([initial, initial.new_empty(len(exported), *initial.shape[1:])])
    cu = torch.tensor(bounds)
    forward_export(rows, states, slots, cu, export_offset, checkpoint, out.flatten(0, 1), 0)
    for b, state in zip(exported, states[count:]):
        pool[site, b].copy_(state)
    return out, states[:count].clone() if exported else states


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

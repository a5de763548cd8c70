"""KDA of equally long sequences in Triton: rows of one ragged batch, in a pool that is made for the call.

    initial [B]  --copy-->  states [B]  --kda_sweep_triton-->  final [B]
    sequence b   --------------------->  o [B, T], and a checkpoint in states [B + b], from there to its pool

B sequences, T tokens of each, H heads, K and V key and value channels, N export entries.
"""

import torch
from torch import Tensor

from .jit_triton import first_objection, no_gpu, not_rows, wrong_dtype
from .kda_scan import as_rows, kda_scan, kda_scan_export
from .kda_sweep_triton import Places, run
from .kda_triton import NOTE, WIDEST


def objection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor,
    *more: Tensor | int,
) -> str | None:
    """Why these arguments are not for here, or None. more: export offsets, the pool and its site."""
    tensors = [x for x in more if isinstance(x, Tensor)]
    widest = max(k.shape[3], v.shape[3])
    return no_gpu(q, k, v, g, beta, initial, *tensors) or first_objection(
        wrong_dtype(q, k, v),
        wrong_dtype(g, beta, initial, *tensors[1:], allowed=(torch.float32,)),
        not_rows(q=q, k=k, v=v, g=g),
        f"heads of {widest} channels, more than {WIDEST}" if widest > WIDEST else None,
    )


def scan(sequences: tuple[Tensor, ...], states: Tensor, columns: tuple[Tensor, ...]) -> Tensor:
    """o of q, k, v, g and beta; sequence b goes on from states [b]. columns: export offsets and slots."""
    v = sequences[2]
    count, tokens = v.shape[:2]
    out, slots = v.new_empty(v.shape), torch.arange(count, device=v.device)
    cu = torch.arange(count + 1, device=v.device) * tokens
    run(*as_rows(*sequences), states, Places(slots, cu, *columns), out.flatten(0, 1), zero=False)
    return out


@kda_scan.impl("triton", objection=objection, note=NOTE)
def kda_scan_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """As the meaning."""
    states = initial.clone(memory_format=torch.contiguous_format)
    return scan((q, k, v, g, beta), states, ()), states


@kda_scan_export.impl("triton", objection=objection, note=NOTE)
def kda_scan_export_triton(
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
    """As the meaning, except that a wrong offset is not refused, for which it would have to wait for the
    device: such a sequence leaves no checkpoint.
    """
    count = min(len(initial), len(export_offset))
    kept, offset = pool[site, :count], export_offset[:count]
    states = initial.new_empty(len(initial) + count, *initial.shape[1:])
    states[: len(initial)], states[len(initial) :] = initial, kept  # what no export changes is put back
    places = torch.arange(len(initial), len(initial) + count, device=offset.device, dtype=torch.int32)
    out = scan((q, k, v, g, beta), states, (offset, places))
    kept.copy_(states[len(initial) :])
    return out, states[: len(initial)].clone()

"""MXFP4 experts in C++ on a CPU, straight from the packed weights; cpu/moe.cpp has the picture."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .moe import experts_unfinalized
from .native import entry, left_to_meaning, library, longs, threads, unavailable


def objection(z, ids, w1, w1_scale, w3, w3_scale, w2, w2_scale, beta, linear_beta) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if z.device.type != "cpu":
        return f"{z.device.type} tensors"
    if z.dtype != torch.float32:
        return f"activations are {z.dtype}, not float32"
    if not all(w.is_contiguous() for w in (w1, w1_scale, w3, w3_scale, w2, w2_scale)):
        return "weights with gaps"
    return unavailable("moe")


@functools.cache
def scratch_of(isa: str | None) -> Callable[..., int]:
    """(T, k, L, I, threads) -> floats of scratch memory that the library for ``isa`` wants."""
    function = library("moe", isa).k3_experts_scratch
    function.argtypes, function.restype = [ctypes.c_int64] * 5, ctypes.c_int64
    return functools.lru_cache(maxsize=256)(function)


@experts_unfinalized.impl("native", objection=objection, note="C++ that was compiled here", by_address=True)
def experts_native(
    z: Tensor,
    ids: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor]:
    """As the meaning; code that was compiled elsewhere and cached may find no kernel here, and warns once."""
    weights = w1, w1_scale, w3, w3_scale, w2, w2_scale
    if left_to_meaning("moe"):
        return experts_unfinalized.meaning(z, ids, *weights, beta, linear_beta)
    return run(z, ids, weights, beta, linear_beta)


def run(
    z: Tensor,
    ids: Tensor,
    weights: tuple[Tensor, ...],
    beta: float,
    linear_beta: float,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with the weights as one argument, on a given instruction set (default: this CPU's best)."""
    z = z if z.stride()[1] == 1 else z.contiguous()
    ids = longs(ids)
    (tokens, top_k), team = ids.shape, threads()
    (experts, inner, _), latent = weights[0].shape, z.shape[1]
    rows = z.new_empty(tokens * top_k, latent)
    idx = torch.empty(tokens, top_k, dtype=torch.int32)
    scratch = z.new_empty(scratch_of(isa)(tokens, top_k, latent, inner, team))
    unknown = entry("moe", "k3_experts", "14q2d4q", isa)(
        z.data_ptr(),
        ids.data_ptr(),
        z.stride()[0],
        tokens,
        top_k,
        experts,
        latent,
        inner,
        *[w.data_ptr() for w in weights],
        beta,
        linear_beta,
        rows.data_ptr(),
        idx.data_ptr(),
        scratch.data_ptr(),
        team,
    )
    assert not unknown, f"an id is not one of {experts} experts"
    return rows, idx

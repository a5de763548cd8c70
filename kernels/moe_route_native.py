"""The choice of experts in C++ on a CPU; cpu/route.cpp has the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from .moe import route
from .native import best_isa, entry, left_to_meaning, threads, unavailable


def objection(x, gate_w, bias, top_k, scale, renormalize) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if x.device.type != "cpu":
        return f"{x.device.type} tensors"
    if wrong := sorted({str(t.dtype) for t in (x, gate_w, bias)} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if x.stride(-1) != 1 or gate_w.stride(-1) != 1:
        return "channels of the rows or of the gate are not side by side"
    if top_k > gate_w.shape[0]:
        return f"{top_k} of {gate_w.shape[0]} experts"
    return "vectors of four lanes gain nothing" if best_isa() == "portable" else unavailable("route")


@route.impl("native", objection=objection, note="C++ that was compiled here", by_address=True)
def route_native(
    x: Tensor, gate_w: Tensor, bias: Tensor, top_k: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """As the meaning; its ids are the meaning's, as both compare scores that were summed in float64."""
    if left_to_meaning("route"):
        return route.meaning(x, gate_w, bias, top_k, scale, renormalize)
    return run(x, gate_w, bias, top_k, scale, renormalize)


def run(
    x: Tensor,
    gate_w: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    renormalize: bool,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The same on a given instruction set (default: this CPU's best)."""
    (tokens, width), experts = x.shape, gate_w.shape[0]
    bias = bias.contiguous()
    weights = x.new_empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int64)
    scores = x.new_empty(tokens, experts)
    entry("route", "k3_route", "13qdq", isa)(
        x.data_ptr(),
        gate_w.data_ptr(),
        bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        scores.data_ptr(),
        x.stride()[0],
        gate_w.stride()[0],
        tokens,
        width,
        experts,
        top_k,
        renormalize,
        scale,
        threads(),
    )
    return weights, ids

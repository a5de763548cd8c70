"""Let a norm do what comes before it: the residual add, the mix over depth.

    s = add(p, a)                                        s, y = add_mix_rms_norm(p, a, blocks, ...)
    y = rms_norm(attn_res_mix(s, blocks, ...), w)   ->
    y = rms_norm(attn_res_mix(p, blocks, ...), w)   ->   y = mix_rms_norm(p, blocks, ...)
    s = add(x, r); y = rms_norm(s, w)               ->   s, y = add_rms_norm(x, r, w)

The fused ops round where the separate ones do, so nothing changes but what is written and read again. Norms
in other spellings are left to the inner compiler, which fuses them as they are.
"""

from __future__ import annotations

import torch
from k3compile.passes.graph import tensor
from k3compile.passes.rewrite import Group, Rewrite, Site

aten, k3 = torch.ops.aten, torch.ops.k3


def add_mix_norm(p, a, blocks, norm_w, proj_w, eps, w, out_eps):
    s = aten.add.Tensor(p, a)
    mixed = k3.attn_res_mix.default(s, blocks, norm_w, proj_w, eps)
    return s, k3.rms_norm.default(mixed, w, out_eps)


def fused_add_mix_norm(p, a, blocks, norm_w, proj_w, eps, w, out_eps):
    both = k3.add_mix_rms_norm.default(p, a, blocks, norm_w, proj_w, eps, w, out_eps)
    return both[0], both[1]


def mix_norm(p, blocks, norm_w, proj_w, eps, w, out_eps):
    return k3.rms_norm.default(k3.attn_res_mix.default(p, blocks, norm_w, proj_w, eps), w, out_eps)


def fused_mix_norm(p, blocks, norm_w, proj_w, eps, w, out_eps):
    return k3.mix_rms_norm.default(p, blocks, norm_w, proj_w, eps, w, out_eps)


def add_norm(x, r, w, eps):
    s = aten.add.Tensor(x, r)
    return s, k3.rms_norm.default(s, w, eps)


def fused_add_norm(x, r, w, eps):
    both = k3.add_rms_norm.default(x, r, w, eps)
    return both[0], both[1]


def adds_rows(first: str, second: str):
    """The add is of two like tensors: a sum that broadcasts or changes dtype is not a residual."""

    def objection(site: Site) -> str | None:
        x, r = tensor(site.argument(first)), tensor(site.argument(second))
        if x is None or r is None:
            return "one of the operands is a number"
        if x.dtype != r.dtype:
            return f"the operands are {x.dtype} and {r.dtype}"
        same = x.dim() == r.dim() and all(map(site.ctx.prover.equal, x.shape, r.shape))
        return None if same else "the add broadcasts"

    return objection


FUSE_NORM = Group(
    "fuse_norm",
    (
        Rewrite("add_mix_norm", add_mix_norm, fused_add_mix_norm, adds_rows("p", "a")),
        Rewrite("mix_norm", mix_norm, fused_mix_norm),
        Rewrite("add_norm", add_norm, fused_add_norm, adds_rows("x", "r")),
    ),
)

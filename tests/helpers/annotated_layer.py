"""The mixed KDA layer as an engine with index tensors writes it: the rows of both classes are graph inputs.

rows   [ verify | decode and prefill ]   verify_rows, other_rows: int64   6 gathers, 2 scatters
"""

from __future__ import annotations

import k3compile.kernels
import torch
from mixed_batch import UNBACKED as MIXED
from mixed_batch import H, K, V, heads, inputs
from torch import Tensor

import k3compile

ops = torch.ops.k3
UNBACKED = f"{MIXED},L['verify_rows']:0,L['other_rows']:0"


def layer(
    x,
    w_qkv,
    w_f,
    w_b,
    a_log,
    dt_bias,
    state,
    rec_u,
    rec_k,
    rec_g,
    slots,
    cu_verify,
    cu_other,
    verify_rows,
    other_rows,
):
    """x [T, WIDTH], verify_rows [Tv], other_rows [T - Tv] -> [T, H * V]"""
    rows = cu_verify.shape[0] - 1
    torch._check(rows >= 0)
    torch._check(rows <= slots.shape[0])
    qkv = x @ w_qkv
    g = ops.kda_decay((x @ w_f).unflatten(-1, (H, K)), a_log, dt_bias, -5.0)
    beta = torch.sigmoid(x @ w_b)
    q, k, v = heads(qkv.index_select(0, verify_rows))
    o_verify = ops.kda_verify(
        *(q, k, v, g.index_select(0, verify_rows), beta.index_select(0, verify_rows)),
        *(state, slots[:rows], cu_verify, rec_u, rec_k, rec_g),
    )
    q, k, v = heads(qkv.index_select(0, other_rows))
    o_other = ops.kda_prefill(
        *(q, k, v, g.index_select(0, other_rows), beta.index_select(0, other_rows)),
        *(state, slots[rows:], cu_other),
    )
    out = x.new_empty(x.shape[0], H, V)
    out.index_copy_(0, verify_rows, o_verify)
    out.index_copy_(0, other_rows, o_other)
    return torch.nn.functional.silu(out.flatten(1))


def arguments(verify: list[int], num_decode: int, prefill: list[int], seed: int = 0):
    """Arguments of :func:`layer` for one mix, the two indices last, and the ranges these hold."""
    given = inputs(verify, num_decode, prefill, seed)[:-1]
    split, total = sum(verify), given[0].shape[0]
    indices = torch.arange(split), torch.arange(split, total)
    return [*given, *indices], [(0, split), (split, total)]


def annotated(args: list[Tensor], ranges: list[tuple[int, int]]) -> list[Tensor]:
    """``args`` with both indices promised to be the ranges."""
    for index, (start, end) in zip(args[-2:], ranges):
        k3compile.annotate_range(index, start, end)
    return args

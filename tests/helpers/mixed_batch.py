"""The middle of a KDA layer on a mixed batch: the real ops, small sizes, written as the model does it.

rows   [ verify | decode and prefill ]   6 index_select, 2 index_copy_
"""

from __future__ import annotations

import k3compile.kernels  # noqa: F401  registers the ops
import torch
from torch import Tensor

ops = torch.ops.k3
H, K, V, WIDTH, SLOTS, DRAFTS = 2, 4, 6, 8, 16, 8
UNBACKED = "L['x']:0,L['slots']:0,L['cu_verify']:0,L['cu_other']:0"
MIXES = [  # lengths of verify rows, number of decode rows, lengths of prefill rows
    ([3], 2, [4, 2]),
    ([], 1, []),
    ([2, 4], 0, []),
    ([], 0, [5]),
    ([1], 0, []),
    ([], 0, [70, 1, 3]),
    ([], 3, [1]),
    ([9, 1], 3, [17]),
    ([], 0, []),
]


def layer(x, w_qkv, w_f, w_b, a_log, dt_bias, state, rec_u, rec_k, rec_g, slots, cu_verify, cu_other, spans):
    """x [T, WIDTH] -> [T, H * V]"""
    num_verify, num_decode, num_prefill = (spans[i].item() for i in range(3))
    torch._check(num_verify >= 0)
    torch._check(num_decode >= 0)
    torch._check(num_prefill >= 0)
    torch._check(num_verify + num_decode + num_prefill == x.shape[0])
    verify = torch.arange(num_verify)
    other = torch.arange(num_verify, num_verify + num_decode + num_prefill)
    rows = cu_verify.shape[0] - 1
    torch._check(rows >= 0)
    torch._check(rows <= slots.shape[0])
    qkv = x @ w_qkv
    g = ops.kda_decay((x @ w_f).unflatten(-1, (H, K)), a_log, dt_bias, -5.0)
    beta = torch.sigmoid(x @ w_b)
    q, k, v = heads(qkv.index_select(0, verify))
    g_verify = g.index_select(0, verify)
    beta_verify = beta.index_select(0, verify)
    o_verify = ops.kda_verify(
        q, k, v, g_verify, beta_verify, state, slots[:rows], cu_verify, rec_u, rec_k, rec_g
    )
    q, k, v = heads(qkv.index_select(0, other))
    g_other = g.index_select(0, other)
    beta_other = beta.index_select(0, other)
    o_other = ops.kda_prefill(q, k, v, g_other, beta_other, state, slots[rows:], cu_other)
    out = x.new_empty(x.shape[0], H, V)
    out.index_copy_(0, verify, o_verify)
    out.index_copy_(0, other, o_other)
    return torch.nn.functional.silu(out.flatten(1))


def heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([H * K, H * K, H * V], 1)
    q, k, v = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (H, V))
    return ops.l2_norm(q, K**-0.5), ops.l2_norm(k, 1.0), v


def inputs(verify: list[int], num_decode: int, prefill: list[int], seed: int = 0) -> list[Tensor]:
    """Arguments of :func:`layer` for one mix."""
    made = torch.Generator().manual_seed(seed)
    other = [1] * num_decode + prefill
    rows = len(verify) + len(other)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    def running(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0)

    return [
        normal(sum(verify) + sum(other), WIDTH),
        normal(WIDTH, 2 * H * K + H * V),
        normal(WIDTH, H * K),
        normal(WIDTH, H),
        normal(H),
        normal(H * K),
        normal(SLOTS, H, V, K),
        normal(SLOTS, DRAFTS + 1, H, V),
        normal(SLOTS, DRAFTS + 1, H, K),
        normal(SLOTS, DRAFTS + 1, H, K),
        torch.randperm(SLOTS - 1, generator=made)[:rows] + 1,
        running(verify),
        running(other),
        torch.tensor([sum(verify), num_decode, sum(prefill)]),
    ]

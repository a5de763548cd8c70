"""KDA written the slow way, token by token in float64, and as a standard ONNX op."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class Case(NamedTuple):
    """One row of tokens and the state before it, float64."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H, K]
    beta: Tensor  # [T, H]
    state: Tensor  # [H, V, K]


def case(tokens: int, seed: int = 0, heads: int = 2, keys: int = 24, values: int = 16) -> Case:
    """A row with decays over the whole range of the bounded gate."""
    source = torch.Generator().manual_seed(seed * 1000 + tokens)

    def normal(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    q, k = (F.normalize(normal(tokens, heads, keys), dim=-1) for _ in range(2))
    g = -5.0 * torch.sigmoid(3 * normal(tokens, heads, keys) - 2)
    beta = torch.sigmoid(2 * normal(tokens, heads))
    return Case(q * keys**-0.5, k, normal(tokens, heads, values), g, beta, normal(heads, values, keys))


def recurrence(row: Case) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the state after the row."""
    state, outs = row.state.clone(), []
    for q, k, v, g, beta in zip(*row[:5]):
        for h in range(len(q)):
            decayed = state[h] * g[h].exp()  # a column for each key channel
            correction = beta[h] * (v[h] - decayed @ k[h])
            state[h] = decayed + torch.outer(correction, k[h])
        outs.append(torch.stack([state[h] @ q[h] for h in range(len(q))]))
    return (torch.stack(outs) if outs else row.v.clone()), state


def onnx_attention(row: Case) -> tuple[Tensor, Tensor]:
    """The same by the LinearAttention op of opset 27, in float32, whose state is [K, V]."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = ("query", "key", "value", "past", "decay", "beta")
    heads = row.q.shape[1]
    node = helper.make_node(
        "LinearAttention",
        names,
        ["out", "present"],
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
        scale=1.0,
    )
    graph = helper.make_graph(
        [node],
        "kda",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("out", "present")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])

    def flat(x):
        return x.reshape(1, len(x), -1).numpy().astype(np.float32)

    past = row.state.mT[None].numpy().astype(np.float32)
    feeds = (flat(row.q), flat(row.k), flat(row.v), past, flat(row.g), flat(row.beta))
    out, present = ReferenceEvaluator(model).run(None, dict(zip(names, feeds)))
    return torch.from_numpy(out).view(row.v.shape), torch.from_numpy(present)[0].mT


def worst(got: Tensor, want: Tensor) -> float:
    """Largest error relative to the largest wanted value; infinite where anything is not finite."""
    if got.numel() == 0:
        return 0.0
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1e-30)).item()

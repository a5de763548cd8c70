"""fla's KDA functions, by a stand-in with their signature: fla itself cannot live beside transformers here.

The stand-in computes with a recurrence written token by token and does what the kernel can do besides.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import pytest
import torch
from kda_oracle import Case, recurrence, worst
from torch import nn
from torch.nn import functional as F

from k3compile.adoption.layers import adopt, unadopt
from k3compile.adoption.of_fla import gate, kda_for

HEADS, KEYS, VALUES = 2, 16, 12


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    if use_gate_in_kernel:
        rate = torch.exp(kwargs["A_log"]).view(-1, 1) if kwargs.get("A_log") is not None else 1.0
        shifted = g if kwargs.get("dt_bias") is None else g + kwargs["dt_bias"].view(g.shape[2:])
        g = (
            -rate * F.softplus(shifted)
            if lower_bound is None
            else lower_bound * torch.sigmoid(rate * shifted)
        )
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    if use_qk_l2norm_in_kernel:
        q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cu_seqlens is None:
        rows = [tuple(x[b] for x in (q, k, v, g, beta)) for b in range(len(q))]
    else:
        rows = [tuple(x[0, a:b] for x in (q, k, v, g, beta)) for a, b in pairwise(cu_seqlens)]
    if initial_state is None:
        states = v.new_zeros(len(rows), v.shape[2], VALUES, KEYS)
    else:
        states = initial_state if state_v_first else initial_state.mT
    done = [recurrence(Case(*row, state)) for row, state in zip(rows, states)]
    o = torch.cat([o for o, _ in done]).view(v.shape)
    final = torch.stack([s for _, s in done])
    return o, (final if state_v_first else final.mT) if output_final_state else None


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False, **kw
):
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, A_log=A_log, dt_bias=dt_bias, **kw
    )


for function in (chunk_kda, fused_recurrent_kda):
    function.__module__ = "fla.ops.kda.chunk"


def arguments(tokens=70, count=2, groups=1):
    source = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    wide = HEADS * groups
    return {
        "q": normal(count, tokens, HEADS, KEYS),
        "k": normal(count, tokens, HEADS, KEYS) * 0.2,
        "v": normal(count, tokens, wide, VALUES),
        "g": -normal(count, tokens, wide, KEYS).abs(),
        "beta": torch.sigmoid(normal(count, tokens, wide)),
    }


def check(given, function=chunk_kda):
    got, want = kda_for(function)(**given), function(**given)
    assert worst(got[0], want[0]) < 1e-10
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        assert worst(got[1], want[1]) < 1e-10


STATE = torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
GATE = {"use_gate_in_kernel": True, "A_log": torch.tensor([0.3, -0.4]).double()}
BIAS = {"dt_bias": torch.linspace(-1, 1, HEADS * KEYS).double()}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"scale": 0.3},
        {"initial_state": STATE, "output_final_state": True},
        {"initial_state": STATE.mT.contiguous(), "output_final_state": True, "state_v_first": True},
        {"use_qk_l2norm_in_kernel": True, "output_final_state": True},
        GATE,
        GATE | BIAS,
        GATE | BIAS | {"lower_bound": -5.0, "safe_gate": True},
        {"use_gate_in_kernel": True, "lower_bound": -3.0},
        {"use_beta_sigmoid_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"disable_recompute": True, "chunk_size": 32, "cu_seqlens_cpu": torch.tensor([0, 1])},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda], ids=["chunk", "recurrent"])
def test_each_argument_means_what_it_means_there(function, more):
    check(arguments() | more, function)


def test_values_may_have_more_heads_than_queries():
    check(arguments(groups=2) | {"output_final_state": True})


def test_packed_sequences():
    cu = torch.tensor([0, 3, 67, 70])
    state = torch.cat([STATE, STATE[:1] * 2])
    given = {"cu_seqlens": cu, "initial_state": state, "output_final_state": True}
    check(arguments(count=1) | given)


def test_positions_follow_the_installed_signature():
    args = list(arguments().values())
    got = kda_for(fused_recurrent_kda)(*args, GATE["A_log"], BIAS["dt_bias"], 0.3, STATE, True)
    want = fused_recurrent_kda(*args, GATE["A_log"], BIAS["dt_bias"], 0.3, STATE, True)
    assert worst(got[0], want[0]) < 1e-10
    assert worst(got[1], want[1]) < 1e-10


@pytest.mark.parametrize(
    "lost",
    [{"cp_context": 3}, {"use_graph": True}, {"return_intermediate_states": True}, {"from_tomorrow": 1}],
    ids=str,
)
def test_what_would_be_lost_is_refused(lost):
    with pytest.raises(ValueError, match=f"chunk_kda: {next(iter(lost))}=.*unadopt"):
        kda_for(chunk_kda)(**arguments(3), **lost)
    assert kda_for(chunk_kda)(**arguments(3), **dict.fromkeys(lost))[0].shape == (2, 3, HEADS, VALUES)


def test_the_gate_needs_neither_rate_nor_bias():
    f = torch.linspace(-3, 3, 2 * 3 * HEADS * KEYS).double().view(2, 3, HEADS, KEYS)
    torch.testing.assert_close(gate(f, None, None, None), -F.softplus(f), rtol=1e-12, atol=1e-12)


class Layer(nn.Module):
    """A layer like fla's, that finds its function in its own globals."""

    def forward(self, q, k, v, g, beta):
        return chunk_kda(q=q, k=k, v=v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def test_a_layer_that_calls_fla_is_adopted():
    model, given = nn.Sequential(Layer()), arguments(9)
    want = model[0](**given)
    adopt(model)
    assert type(model[0]) is not Layer
    with torch.no_grad():
        compiled = torch.compile(model[0], backend="k3", fullgraph=True, options={"inner": "eager"})
        assert worst(model[0](**given), want) < 1e-10
        assert worst(compiled(**given), want) < 1e-10
    assert type(unadopt(model)[0]) is Layer


def test_the_function_is_known_by_where_it_is_defined():
    stranger = types.FunctionType(chunk_kda.__code__, vars(sys.modules[__name__]), "chunk_kda")
    stranger.__module__ = "elsewhere"

    class Other(nn.Module):
        forward = types.FunctionType(Layer.forward.__code__, {"chunk_kda": stranger}, "forward")

    with pytest.raises(ValueError, match="no KDA layer"):
        adopt(Other())

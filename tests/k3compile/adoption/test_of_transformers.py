"""Each function that stands in for one of transformers' equals it, argument by argument, or refuses."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import Draw
from kda_oracle import case, recurrence, worst

from k3compile.adoption.of_transformers import TOKENS, conv_for, conv_update_for, kda_for

theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear", reason="the oracle")
pytestmark = pytest.mark.oracle

chunk, recurrent = theirs.chunk_kimi_delta_attention, theirs.recurrent_kimi_delta_attention
conv, update = theirs.causal_conv1d_fn, theirs.causal_conv1d_update
CHANNELS = 12


def arguments(tokens, dtype=torch.float32):
    """q, k, v, g, beta and a state as transformers lays it out, [B, H, K, V]."""
    rows = [case(tokens, seed) for seed in range(2)]
    q, k, v, g, beta, state = (torch.stack(parts).to(dtype) for parts in zip(*rows))
    return (3 * q, 2 * k, v, g, beta), state.mT.contiguous()


def convolution(tokens):
    draw = Draw(torch.float32)
    return draw.normal(2, CHANNELS, tokens), draw.normal(CHANNELS, 4), draw.normal(2, CHANNELS, 4)


@pytest.mark.parametrize("function", [chunk, recurrent], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_kda_equals_theirs(function, tokens):
    args, state = arguments(tokens)
    for initial in (None, state):
        for unit in (True, False):
            given = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": unit}
            got, want = kda_for(function)(*args, **given), function(*args, **given)
            assert worst(got[0], want[0]) < 5e-6
            assert worst(got[1], want[1]) < 5e-6


def test_kda_is_exact_in_float64_where_theirs_rounds():
    args, state = arguments(70, torch.float64)
    scale = args[0].shape[-1] ** -0.5
    o, final = kda_for(chunk)(*args, initial_state=state, output_final_state=True)
    for b in range(2):
        row = case(70, b)
        want, last = recurrence(row._replace(q=3 * row.q * scale, k=2 * row.k))
        assert worst(o[b], want) < 1e-10
        assert worst(final[b].mT, last) < 1e-10


def test_kda_keeps_the_query_dtype_and_no_state_unless_asked():
    args, _ = arguments(5, torch.bfloat16)
    o, final = kda_for(chunk)(*args, initial_state=None, output_final_state=False)
    assert o.dtype == torch.bfloat16
    assert final is None


def test_a_chunk_size_changes_nothing_but_speed():
    args, _ = arguments(40)
    a, b = (kda_for(chunk)(*args, chunk_size=n, use_qk_l2norm_in_kernel=True)[0] for n in (16, 64))
    assert torch.equal(a, b)
    assert worst(a, chunk(*args, chunk_size=16, use_qk_l2norm_in_kernel=True)[0]) < 5e-6


@pytest.mark.parametrize("packed", ["cu_seqlens", "seq_idx"])
def test_packed_sequences_are_refused(packed):
    args, _ = arguments(5)
    with pytest.raises(ValueError, match=f"chunk_kimi_delta_attention: {packed}.*unadopt"):
        kda_for(chunk)(*args, **{packed: torch.tensor([0, 5])})
    x, weight, _ = convolution(5)
    with pytest.raises(ValueError, match=r"causal_conv1d_fn: .*packed"):
        conv_for(conv)(x, weight, activation="silu", **{packed: torch.tensor([0, 5])})


@pytest.mark.parametrize("tokens", [1, 3, 4, 70])
def test_the_convolution_equals_theirs(tokens):
    x, weight, _ = convolution(tokens)
    want = conv(x, weight, activation="silu")
    torch.testing.assert_close(conv_for(conv)(x, weight, activation="silu"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("earlier", [1, 2, 3, 4, 9])
def test_only_this_calls_tokens_are_convolved_after_earlier_ones(earlier):
    x, weight, _ = convolution(earlier + 6)
    want = conv(x, weight, activation="silu")[:, :, -6:]
    got = conv_for(conv)(x, weight, activation="silu", **{TOKENS: 6})
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kept", [4, 7])
def test_a_decode_step_moves_the_state_it_is_given(tokens, kept):
    x, weight, _ = convolution(tokens)
    state = Draw(torch.float32).normal(2, CHANNELS, kept)
    ours, other = state.clone(), state.clone()
    got = conv_update_for(update)(x, ours, weight, None, "silu")
    torch.testing.assert_close(got, update(x, other, weight, None, "silu"), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(CHANNELS, 3)}, "3 taps, not 4"),
        ({"bias": torch.zeros(CHANNELS)}, "a bias"),
        ({"activation": "gelu"}, "activation='gelu', not 'silu'"),
        ({"activation": None}, "activation=None"),
    ],
    ids=str,
)
def test_another_convolution_is_refused(change, said):
    x, weight, state = convolution(1)
    given = {"weight": weight, "bias": None, "activation": "silu"} | change
    with pytest.raises(ValueError, match=f"causal_conv1d_fn: .*{said}"):
        conv_for(conv)(x, **given)
    with pytest.raises(ValueError, match=f"causal_conv1d_update: .*{said}"):
        conv_update_for(update)(x, state, **given)


def test_where_a_gradient_is_wanted_theirs_is_called():
    (q, *others), state = arguments(5)
    grads = []
    for function in (chunk, kda_for(chunk)):
        leaf = q.clone().requires_grad_()
        o, _ = function(leaf, *others, initial_state=state, use_qk_l2norm_in_kernel=True)
        o.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    x, weight, state = convolution(5)
    weight.requires_grad_()
    assert conv_for(conv)(x, weight, activation="silu").requires_grad
    assert conv_update_for(update)(x, state, weight, None, "silu").requires_grad

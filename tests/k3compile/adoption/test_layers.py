"""An adopted model gives what transformers' own gives, as a whole and through ``backend="k3"``."""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import k3compile
from k3compile import report
from k3compile.adoption.layers import adopt, replacements, unadopt

transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
from hf_models import kimi_linear, prompt  # noqa: E402  it imports transformers

pytestmark = pytest.mark.oracle
BOUND = 1e-4


@pytest.fixture(autouse=True)
def inference():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def theirs():
    return kimi_linear()


@pytest.fixture(scope="module")
def ours():
    return adopt(kimi_linear())


def close(got, want):
    assert want.std() > 0.1
    assert (got - want).abs().max() < BOUND


@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 130])
def test_logits_are_theirs(theirs, ours, tokens):
    ids = prompt(tokens, 2)
    close(ours(ids).logits, theirs(ids).logits)


def test_padding_on_the_left_is_theirs(theirs, ours):
    ids, mask = prompt(70, 3), torch.ones(3, 70, dtype=torch.int64)
    mask[0, :7], mask[2, :66] = 0, 0
    got, want = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    close(got, want)


def test_a_prompt_in_parts_leaves_the_same_cache(theirs, ours):
    ids, caches = prompt(80, 2), []
    for model in (ours, theirs):
        cache = None
        for part in (ids[:, :2], ids[:, 2:70], ids[:, 70:71], ids[:, 71:]):
            out = model(part, cache=cache, use_cache=True)
            cache = out.cache
        caches.append((cache, out.logits))
    close(caches[0][1], caches[1][1])
    for mine, other in zip(caches[0][0].layers[:2], caches[1][0].layers[:2]):
        torch.testing.assert_close(mine.conv_states[0], other.conv_states[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.recurrent_states[0], other.recurrent_states[0], rtol=1e-4, atol=1e-4)


class Convolved(TorchDispatchMode):
    """Notes how many tokens each convolution is told are new."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.k3.conv_scan.default:
            self.counts.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


def test_a_convolution_counts_the_tokens_of_its_call_alone(ours):
    ids, seen = prompt(12), Convolved()
    with seen:  # what transformers hands over is padded at first, and later has the last four in front
        cache = ours(ids[:, :2], use_cache=True).cache
        ours(ids[:, 2:11], cache=cache)
        ours(ids[:, 11:], cache=cache)
    assert seen.counts == [2, 2, 9, 9, 1, 1]


def test_generate_gives_the_same_tokens(theirs, ours):
    ids, mask = prompt(20, 2), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    for given in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}):
        got, want = (m.generate(ids, attention_mask=mask, max_new_tokens=20, **given) for m in (ours, theirs))
        assert torch.equal(got, want)


@pytest.mark.slow
def test_compiled_whole_it_has_the_same_logits_and_a_report(theirs):
    ours = adopt(kimi_linear())
    compiled = torch.compile(ours, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for tokens in (70, 75, 9, 130):
        ids = prompt(tokens, 2)
        close(compiled(ids).logits, theirs(ids).logits)
    assert graphs["unique_graphs"] - before == 2, "one for the first length and one for every other"
    ops = [r.op for r in report.latest().remarks if r.pass_name == "lower"]
    assert ops.count("k3.kda_scan") + ops.count("k3.kda_scan_export") == 2
    ids, mask = prompt(40, 2), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :33] = 0
    close(
        compiled(ids, attention_mask=mask).logits[mask.bool()],
        theirs(ids, attention_mask=mask).logits[mask.bool()],
    )


@pytest.mark.slow
def test_every_kda_layer_leaves_a_checkpoint_to_go_on_from(ours):
    model, ids = adopt(kimi_linear()), prompt(70, 2)
    compiled = torch.compile(model, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
    with k3compile.export_at([64, 0]):
        logits = compiled(ids).logits
    made = report.latest()
    assert (made.applied("state_export"), made.missed("state_export")) == (4, [])
    assert "note: no top-k finalize" in made.text()
    assert torch.equal(logits, compiled(ids).logits)
    left, cache = k3compile.checkpoints(compiled), ours(ids[:, :64], use_cache=True).cache
    assert len(left.states) == len(left.windows) == 2
    for layer, state, window in zip(cache.layers, left.states, left.windows):
        torch.testing.assert_close(state[0].mT, layer.recurrent_states[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(window[0].mT, layer.conv_states[0][0, :, 1:], rtol=1e-5, atol=1e-5)
        assert not state[1].any()
        layer.recurrent_states[0][0] = state[0].mT
        layer.conv_states[0][0, :, 1:] = window[0].mT
    rest = ours(ids[:, 64:], cache=cache, use_cache=True).logits
    close(rest[0], logits[0, 64:])


@pytest.mark.slow
def test_generate_runs_on_the_compiled_forward(theirs):
    ours = adopt(kimi_linear())
    ours.compile(backend="k3", fullgraph=True, options={"inner": "eager"})
    ids = prompt(12, 2)
    for _ in range(2):
        got, want = (m.generate(ids, max_new_tokens=16, do_sample=False) for m in (ours, theirs))
        assert torch.equal(got, want)
    assert len(report.all()) >= 3, "the prompt, the first step, any later step"


def test_only_the_given_model_is_adopted_and_twice_is_once(theirs):
    ours = kimi_linear()
    layer = ours.model.layers[0].self_attn
    original, functions = type(layer), dict(vars(sys.modules[type(layer).__module__]))
    assert k3compile.adopt(ours) is ours
    first = type(layer)
    assert first is not original
    assert isinstance(layer, original)
    assert type(adopt(ours).model.layers[0].self_attn) is first
    assert type(theirs.model.layers[0].self_attn) is original
    assert all(vars(sys.modules[original.__module__])[n] is x for n, x in functions.items())
    assert k3compile.unadopt(ours) is ours
    assert type(layer) is original
    assert "forward" not in vars(layer)
    assert unadopt(ours) is ours


def test_an_adopted_model_can_be_copied(ours):
    ids, twin = prompt(9), copy.deepcopy(ours)
    want = ours(ids).logits
    twin.model.layers[0].self_attn.o_proj.weight.zero_()
    assert not torch.equal(twin(ids).logits, want)
    assert torch.equal(ours(ids).logits, want)


def test_decorators_around_the_forward_are_kept(ours):
    layer, x = ours.model.layers[0].self_attn, torch.randn(1, 3, 48)
    cache = ours(prompt(4), use_cache=True).cache
    with pytest.warns(FutureWarning, match="cache_params"):
        got = layer(x, cache_params=copy.deepcopy(cache))
    assert torch.equal(got, layer(x, cache=cache))


def test_gradients_are_theirs(theirs):
    ours, ids, grads = adopt(kimi_linear()), prompt(5), []
    with torch.enable_grad():
        for model in (ours, theirs):
            model(ids, labels=ids).loss.backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("change", [{"linear_conv_kernel_dim": 3}, {"hidden_act": "gelu"}], ids=str)
def test_a_convolution_that_k3_has_not_is_refused_at_the_call(change):
    model = adopt(kimi_linear(2, **change))
    with pytest.raises(ValueError, match=r"causal_conv1d_fn: .*unadopt"):
        model(prompt(5))
    assert unadopt(model)(prompt(5)).logits.shape == (1, 5, 128)


def test_a_model_without_kda_is_refused_with_what_is_known():
    with pytest.raises(ValueError, match=r"Sequential has no KDA layer.*chunk_kimi.*chunk_kda"):
        adopt(nn.Sequential(nn.Linear(2, 2)))


def test_a_forward_replaced_on_the_instance_is_refused():
    model = kimi_linear(2)
    layer = model.model.layers[0].self_attn
    layer.forward = types.MethodType(type(layer).forward, layer)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn has a forward of its own"):
        adopt(model)


def test_a_decorator_that_hides_the_forward_is_refused(monkeypatch):
    layer = type(kimi_linear(2).model.layers[0].self_attn)

    class Hidden(layer):
        def forward(self, *args, **kwargs):
            raise AssertionError

    Hidden.forward.__wrapped__ = layer.forward
    model = kimi_linear(2)
    model.model.layers[0].self_attn.__class__ = Hidden
    assert len(replacements(Hidden)) == 4
    with pytest.raises(ValueError, match="wrapped in a way"):
        adopt(model)

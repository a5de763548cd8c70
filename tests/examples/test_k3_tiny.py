"""The training of the tiny model: what it computes, what it rounds, that it learns, and what it writes."""

import random
import sys
from pathlib import Path

import pytest
import torch
from k3compile.kernels.mxfp4 import pack, unpack
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.weights import load_model
from small_models import Row, make_step

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from k3_tiny import draft
from k3_tiny.export import export, tiny
from k3_tiny.forward import forward
from k3_tiny.kda import delta_rule
from k3_tiny.optimiser import Optimiser
from k3_tiny.rows import batch
from k3_tiny.situ import situ
from k3_tiny.training import step
from k3_tiny.weights import initial, mxfp4, seen, unpacked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("random") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def test_the_training_forward_computes_what_the_model_computes(folder):
    model = load_model(folder, torch.float64, tap_layers=(1, 4, 7))
    tokens = torch.randint(0, 1024, (3, 80), generator=torch.Generator().manual_seed(0))
    rows = [Row(line.tolist(), slot, 0, (2 * slot - 1, 2 * slot)) for slot, line in enumerate(tokens, 1)]
    hidden, taps = model(make_step(rows), model.make_pools(4, 7, 64))
    with torch.no_grad():
        found = forward(model.config, unpacked(model), tokens, taps=(1, 4, 7))
    torch.testing.assert_close(found.hidden.flatten(0, 1), hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack(found.taps).flatten(1, 2), taps, rtol=1e-9, atol=1e-9)


def test_a_chunk_survives_the_strongest_decay():
    q, k, v = torch.randn(3, 1, 32, 2, 8, generator=torch.Generator().manual_seed(0)).double()
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = torch.full((1, 32, 2, 8), -5.0).double(), torch.full((1, 32, 2), 0.7).double()
    found = delta_rule(*(x.float().requires_grad_() for x in (q, k, v, g, beta)))
    state, want = torch.zeros(2, 8, 8).double(), []
    for t in range(32):
        state = state * g[0, t, :, None].exp()
        u = beta[0, t, :, None] * (v[0, t] - torch.einsum("hvk,hk->hv", state, k[0, t]))
        state = state + u[:, :, None] * k[0, t, :, None]
        want.append(torch.einsum("hvk,hk->hv", state, q[0, t]))
    torch.testing.assert_close(found[0].double(), torch.stack(want), rtol=1e-5, atol=1e-6)
    found.sum().backward()


def test_gradients_of_the_chunked_rule_and_of_situ_are_numerically_right():
    random_ = torch.Generator().manual_seed(0)
    q, k, v, g = torch.randn(4, 1, 16, 1, 2, generator=random_, dtype=torch.float64)
    inputs = [q, k, v, -g.abs(), torch.rand(1, 16, 1, generator=random_, dtype=torch.float64)]
    assert torch.autograd.gradcheck(delta_rule, [x.requires_grad_() for x in inputs])
    both = [(4 * x.detach()).requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(lambda a, b: situ(a, b, 4.0, 25.0), both)


def test_the_rounding_of_experts_is_that_of_the_packer_bit_for_bit():
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    w[0], w[1], w[2], w[3] = 0.0, w[1] * 1e-12, w[2] * 1e9, -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.9, 7.99, -0.25, -2.5, -5.0])
    w[4, : len(ties)], w[4, len(ties)] = ties, 4.0
    w[5] = torch.linspace(-7.99, 7.99, 256)
    found = mxfp4(w)
    assert torch.equal(found.view(torch.int32), unpack(*pack(w), torch.float32).view(torch.int32))


@pytest.mark.slow
def test_a_step_learns_what_it_is_shown(tokenizer):
    config, master = tiny(), initial(tiny(), 0)
    optimiser, rows = Optimiser(master), batch(tokenizer, "short", 4, 64, random.Random(0), 4)
    losses = [step(config, master, optimiser, [rows], 0.006, 0.004).loss for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


def test_rows_are_the_same_for_the_same_seed_and_only_answers_are_learned(tokenizer):
    for kind in ("short", "thinking", "tool", "long"):
        one, two = (batch(tokenizer, kind, 3, 256, random.Random(1)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, two))
        assert torch.equal(one.tokens[:, 1:], one.targets[:, :-1])
        assert 0.05 < one.learned.float().mean() < 0.7
    [row] = batch(tokenizer, "short", 1, 512, random.Random(2)).tokens.tolist()
    assert tokenizer.decode(row).count("Remember") > 1


def test_the_file_holds_exactly_what_was_trained(tmp_path):
    master = initial(tiny(), 3)
    export(tmp_path / "out", master)
    model = load_model(tmp_path / "out")
    weights = seen(master, torch.float32)
    found = unpacked(model)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name].view(value.shape), value), name


def test_a_step_of_the_draft_learns_and_past_an_answer_nothing_is_asked(folder, tokenizer):
    target = load_model(folder)
    one = draft.DSparkModel(draft.DSparkConfig.from_dict(draft.RAW, target.config))
    draft.fill(one, 0)
    parameters = {n: p.requires_grad_() for n, p in one.named_parameters()}
    optimiser = Optimiser({n: p.detach() for n, p in parameters.items()})
    weights = unpacked(target)
    rows, taps = draft.lesson(target.config, weights, (1, 4, 7), tokenizer, random.Random(0))
    losses = []
    for _ in range(5):
        loss, _ = draft.loss_of(one, target, rows, taps, random.Random(1))
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
        with torch.no_grad():
            optimiser.step(gradients, 0.006, 0.003)
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    nothing = rows._replace(learned=torch.zeros_like(rows.learned))
    assert draft.loss_of(one, target, nothing, taps, random.Random(1))[0].isnan()

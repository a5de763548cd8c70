"""Greedy identity, compiled: exact in float64 without Inductor, tie-aware in float32 with it."""

from array import array

import pytest
import torch
from identity import LENGTHS, PreemptAt, prompts, serve, serve_alone
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.request import Request
from k3compile.runtime.scheduler import Work
from k3compile.runtime.step import build
from k3compile.runtime.weights import load_model
from tie_aware import Reference, RouterLog, assert_identical, forced_experts, judge, stacked

from k3compile.forward import compile_forward
from k3compile.options import CompileOptions

SHORT = (1, 33, 64, 130)
SIZES = {"num_pages": 120, "page_size": 16, "max_num_seqs": 6}  # the same pools, so the same graphs, always
LARGE = {"num_pages": 800, "page_size": 16, "max_num_seqs": 16}


class Compiled:
    """Compiled once; every engine's pools have the same sizes and go through the same graphs."""

    def __init__(self, model, options: CompileOptions) -> None:
        self.model, self.options, self.forward = model, options, None

    def __call__(self, model, pools):
        assert model is self.model
        if self.forward is None:
            self.forward = compile_forward(model, pools, self.options)
        self.forward.pools = pools
        return self.forward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", seed=0)


@pytest.fixture(scope="module")
def exact(checkpoint):
    """The model in float64, compiled without Inductor, and short prompts served alone uncompiled."""
    model = load_model(checkpoint, torch.float64)
    asked = prompts(SHORT)
    return model, Compiled(model, CompileOptions(inner="aot_eager")), asked, serve_alone(model, asked, 40)


@pytest.mark.parametrize("budget", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 2048))])
def test_compiled_in_float64_gives_the_tokens_of_the_plain_model_alone(exact, budget):
    model, compiled, asked, alone = exact
    answers = serve(model, asked, 40, compiled, max_num_batched_tokens=budget, **SIZES)
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    for got, expected in zip(answers, alone):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-8)
    assert compiled.forward.graphs() == 4


def test_compiled_requests_go_on_after_they_were_thrown_out(exact):
    model, compiled, asked, alone = exact
    hook = PreemptAt([1, 3], token=37)
    answers = serve(model, asked, 40, compiled, between_steps=hook, **SIZES)
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    assert not hook.left
    assert compiled.forward.graphs() == 4


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2048, 64, 5])
def test_sixteen_prompts_compiled_in_float64(checkpoint, budget):
    model = load_model(checkpoint, torch.float64)
    asked = prompts(LENGTHS)
    hook = PreemptAt([0, 7, 15], token=37)
    answers = serve(
        model,
        asked,
        48,
        Compiled(model, CompileOptions(inner="aot_eager")),
        between_steps=hook,
        max_num_batched_tokens=budget,
        **LARGE,
    )
    assert [a.tokens for a in answers] == [a.tokens for a in serve_alone(model, asked, 48)]
    assert not hook.left


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Sixteen prompts alone in float64, with what is needed to judge another answer."""
    model = load_model(checkpoint, torch.float64)
    asked = prompts(LENGTHS)
    known = []
    for prompt in asked:
        with RouterLog().watching() as log:
            (answer,) = serve(model, [prompt], 48, router_log=log, max_num_seqs=1)
        experts, gaps = stacked(log.experts["0"]), stacked(log.router_gaps["0"])
        known.append(Reference(len(prompt), answer.tokens, answer.best, experts, gaps))
    return model, asked, known


def verdicts(asked, known, model, compiled, **config):
    """Serve everything together and judge each request."""
    with RouterLog().watching() as log:
        answers = serve(model, asked, 48, compiled, router_log=log, **config)
    return [judge(k, a.tokens, stacked(log.experts[str(i)])) for i, (k, a) in enumerate(zip(known, answers))]


@pytest.mark.slow
def test_the_plain_model_in_float32_differs_at_ties_alone(checkpoint, reference):
    _, asked, known = reference
    model = load_model(checkpoint, torch.float32)
    print(assert_identical(verdicts(asked, known, model, None, max_num_batched_tokens=64)))


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_in_float32_differs_at_ties_alone(checkpoint, reference):
    _, asked, known = reference
    model = load_model(checkpoint, torch.float32)
    compiled = Compiled(model, CompileOptions(lower={"route": "meaning"}))  # as an op, so that it is watched
    for budget in (2048, 64, 5):
        found = verdicts(asked, known, model, compiled, max_num_batched_tokens=budget, **LARGE)
        print(budget, assert_identical(found))
    assert compiled.forward.graphs() == 4


def teacher_forced(model, forward, tokens, known: Reference, num_pages: int) -> torch.Tensor:
    """Logits [n, V] at the output positions, of one pass over the reference's tokens with its experts."""
    request = Request("a", tokens)
    pages = array("q", range(1, num_pages))
    step = build([Work(request, len(tokens), 0, True, 1, pages)], 16).step
    with torch.no_grad(), forced_experts(known.experts[: len(tokens)]):
        hidden, _ = forward(step)
        return model.logits(hidden[known.prompt_tokens - 1 :])


@pytest.mark.slow
@pytest.mark.inductor
def test_inductors_logits_agree_when_it_is_told_the_tokens_and_the_experts(checkpoint, reference):
    exact_model, asked, known = reference
    model = load_model(checkpoint, torch.float32)
    size, pages = LARGE["page_size"], 80
    pools, exact_pools = (m.make_pools(3, pages, size, 0) for m in (model, exact_model))
    forward = compile_forward(model, pools, CompileOptions(lower={"route": "meaning"}))
    for prompt, one in zip(asked, known):
        tokens = [*prompt, *one.tokens[:-1]]
        for layer in (*pools, *exact_pools):
            layer[0].zero_()
            layer[-1].zero_()
            if hasattr(layer, "window"):
                layer.window.zero_()
        got = teacher_forced(model, forward, tokens, one, pages)
        expected = teacher_forced(exact_model, lambda s: exact_model(s, exact_pools), tokens, one, pages)
        assert (got.double() - expected).abs().max() < 1e-4
        assert expected.argmax(-1).tolist() == list(one.tokens)

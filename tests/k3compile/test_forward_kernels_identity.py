"""The trained tiny model on its own tasks: whichever kernels compute it, greedy tokens differ at ties alone.

float64, alone, uncompiled --> the reference      float32: meanings, native kernels, Inductor + native kernels
"""

import pytest
import torch
from identity import serve
from k3compile.kernels import OPS
from k3compile.kernels.native import unavailable
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.weights import load_model
from tie_aware import Reference, RouterLog, assert_identical, judge, stacked

from k3compile.bench.recall_tasks import TASKS, generate
from k3compile.cli.loading import SHIPPED
from k3compile.forward import compile_forward
from k3compile.options import CompileOptions

TOKENS = 16  # of an answer; it goes on behind the stop token
SIZES = {"num_pages": 800, "page_size": 16, "max_num_seqs": 12}  # the same pools, so the same graphs, always
MEANINGS = {name: "meaning" for name, op in OPS.items() if op.implementations}
WATCHED = {"route": "meaning"}  # as an op that computes by its meaning, so that its choices are seen
WAYS = {
    "meanings": CompileOptions(inner="eager", lower=MEANINGS),
    "native": CompileOptions(inner="eager", lower=WATCHED),
    "inductor": CompileOptions(inner="inductor", lower=WATCHED),
}


@pytest.fixture(scope="module")
def prompts():
    """Two problems of each task."""
    tokenizer = Tokenizer(SHIPPED)
    return [p.prompt_ids(tokenizer) for task in TASKS for p in generate(task, 2, seed=5)]


@pytest.fixture(scope="module")
def known(prompts):
    """Each prompt alone in float64, with what is needed to judge another answer."""
    model, found = load_model(SHIPPED, torch.float64), []
    for prompt in prompts:
        with RouterLog().watching() as log:
            (answer,) = serve(model, [prompt], TOKENS, router_log=log, max_num_seqs=1)
        experts, gaps = stacked(log.experts["0"]), stacked(log.router_gaps["0"])
        found.append(Reference(len(prompt), answer.tokens, answer.best, experts, gaps))
    return found


class Way:
    """The model in float32 compiled one way; every engine goes through the same graphs."""

    def __init__(self, name):
        self.model, self.options, self.forward = load_model(SHIPPED, torch.float32), WAYS[name], None

    def __call__(self, model, pools):
        if self.forward is None:
            self.forward = compile_forward(model, pools, self.options)
        self.forward.pools = pools
        return self.forward

    def verdicts(self, asked, known):
        """Serve together, and judge each."""
        with RouterLog().watching() as log:
            answers = serve(self.model, asked, TOKENS, self, router_log=log, **SIZES)
        pairs = enumerate(zip(known, answers))
        return [judge(k, a.tokens, stacked(log.experts[str(i)])) for i, (k, a) in pairs]

    def computes(self, op):
        """What the reports say of an op."""
        return {r.choices[f"k3.{op}"] for r in self.forward.reports if f"k3.{op}" in r.choices}


def check(name, prompts, known):
    """All at once, then one at a time."""
    way = Way(name)
    together = way.verdicts(prompts, known)
    alone = [way.verdicts([p], [k])[0] for p, k in zip(prompts, known)]
    print(name, assert_identical(together), assert_identical(alone))
    assert way.forward.graphs() == 4
    return way


@pytest.mark.slow
def test_by_their_meanings(prompts, known):
    way = check("meanings", prompts, known)
    assert way.computes("experts_unfinalized") == {"computed by its meaning"}
    assert way.computes("latent_tail") == {"computed by its meaning"}


def by_native(way):
    """A run without these kernels would show nothing of them."""
    for op, source in (("experts_unfinalized", "moe"), ("kda_prefill_into", "kda")):
        if unavailable(source):
            pytest.skip(unavailable(source))
        assert all(said.startswith("computed by native") for said in way.computes(op)), op
        assert way.computes(op), op


@pytest.mark.slow
def test_by_native_kernels(prompts, known):
    by_native(check("native", prompts, known))


@pytest.mark.slow
@pytest.mark.inductor
def test_by_inductor_and_native_kernels(prompts, known):
    by_native(check("inductor", prompts, known))

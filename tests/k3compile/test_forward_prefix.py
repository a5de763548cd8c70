"""The tiny model, compiled with the passes: a prompt is run once, in as few passes as the budget allows.

What is counted are the rows that reach the model's forward and the states it is asked to write.
"""

import random
from functools import cache

import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.weights import load_model

from k3compile.forward import compile_forward
from k3compile.options import CompileOptions
from k3compile.serving import plan

SIZES = {"max_num_seqs": 2, "page_size": 64, "num_pages": 300, "num_checkpoints": 16, "max_model_len": 9000}
BUDGET = {"max_num_batched_tokens": 8192, "num_drafts": 8}  # the drafts are charged seven rows
SAID = 3


def text(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(700) for _ in range(length)]


class Silent:
    """A drafter that is charged for and proposes nothing, so that rows are those of tokens."""

    lookahead, taps = 0, ()

    def observe(self, step, taps): ...

    def forget(self, request): ...

    def propose(self, requests, holdings):
        return [None for _ in requests]


class Counted:
    """A forward that notes the rows and the exported states of each step."""

    def __init__(self, forward):
        self.forward, self.exports = forward, getattr(forward, "exports", False)
        self.rows, self.states = [], 0

    def __call__(self, step):
        self.rows.append(len(step.tokens))
        self.states += int((step.export_offset > 0).sum())
        return self.forward(step)


class Lab:
    """The tiny model in float64, compiled once for the features of ``default``; ``baseline`` is not."""

    def __init__(self, folder):
        self.model = cache(lambda replay: load_model(folder, torch.float64, state_replay=replay))
        self.compiled, self.answers = None, {}
        config = EngineConfig(max_num_batched_tokens=1024, max_num_seqs=1, max_model_len=1024)
        self.plain = make_engine(self.model(True), config)

    def serve(self, features, **config):
        """An engine with a prefix cache, and the :class:`Counted` that it calls."""
        made = plan(
            EngineConfig(prefix_cache=True, poison=True, **SIZES, **BUDGET, **config),
            CompileOptions(features=features, inner="aot_eager"),
        )
        counted = []

        def forward(model, pools):
            if features == "baseline":
                counted.append(Counted(lambda step: model.forward(step, pools)))
            else:
                self.compiled = self.compiled or compile_forward(model, pools, made.options, 2)
                self.compiled.pools = pools
                counted.append(Counted(self.compiled))
            return counted[0]

        model = self.model(made.engine.state_replay)
        return make_engine(model, made.engine, forward, None, Silent()), counted[0]

    def alone(self, prompt):
        """The answer of the plain model; a prompt that comes again has the one it had."""
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key] = ask(self.plain, prompt)[0]
        return self.answers[key]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "tiny", seed=0))


def ask(engine, prompt, max_tokens=SAID):
    """The answer, and how many cached tokens the client is told of."""
    said, told = [], []

    def listen(update):
        assert update.error is None
        said.extend(update.tokens)
        told.append(update.cached_tokens)

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Request("a", prompt, params), listen)
    while engine.step():
        pass
    engine.cache.check()
    return said, told[-1]


@pytest.mark.slow
@pytest.mark.parametrize("features", ["default", "baseline"])
def test_a_prompt_of_8000_tokens_is_one_pass_and_one_state_and_its_next_turn_runs_what_is_new(lab, features):
    """Without the export it is cut at the state, as it used to be."""
    new = features == "default"
    engine, forward = lab.serve(features, block_size=1536, prefix_match_unit=128 if new else 1536)
    assert forward.exports == new
    prompt, state = text(8000), 7936 if new else 7680
    said, cached = ask(engine, prompt, max_tokens=1)
    assert cached == 0
    assert forward.rows == ([8000] if new else [7680, 320])
    assert forward.states == new
    assert [node.tokens for node in engine.cache.index if node.state] == [state]
    turn = [*prompt, *said, *text(150, seed=1)]
    assert ask(engine, turn, max_tokens=1)[1] == state
    assert sum(forward.rows) == 8000 + len(turn) - state


@pytest.mark.parametrize("features", ["default", pytest.param("baseline", marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_prompts_around_a_boundary_cold_warm_extended_and_resent(lab, blocks, features):
    """Each answer is that of the plain model alone; warm: another prompt has left a part of it."""
    block = 128
    engine, forward = lab.serve(features, block_size=block, prefix_match_unit=block)

    def run(prompt, expected):
        before = len(forward.rows)
        said, cached = ask(engine, prompt)
        assert said == lab.alone(prompt)
        assert cached == expected
        assert sum(forward.rows[before:]) == len(prompt) - cached + SAID - 1

    for off in (-1, 0, 1):
        length = blocks * block + off
        prompt = text(length, seed=length)
        run(prompt, 0)
        run(prompt, (length - 1) // block * block)
        run([*prompt, *text(70, seed=1)], length // block * block)
        # its first tokens are common; where the one state lies beyond them, nothing is found
        run([*prompt[:-10], *text(30, seed=2)], (blocks - 1) * block if off < 1 else 0)

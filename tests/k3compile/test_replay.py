"""Passes of few rows as recorded calls: the bits of the graphs, whatever changes between steps."""

import copy
import ctypes
import dataclasses
import operator
from contextlib import contextmanager

import pytest
import torch
from k3compile.kernels.native import threads, unavailable
from k3compile.runtime.step import Step
from small_models import SMALL, Row, make_step, small_model
from torch import Tensor, nn

from k3compile import recording
from k3compile.forward import compile_forward
from k3compile.options import CompileOptions
from k3compile.program import Together
from k3compile.replay import AFTER, KEPT, Replays

# ---- without a compiler: "generated code" of our own, as a graph would run it ----


def cpp_scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Stands for a kernel: in place, by addresses, past torch."""
    xs, factors, outs = ((ctypes.c_float * t.numel()).from_address(t.data_ptr()) for t in (x, factor, out))
    for i in range(len(outs)):
        outs[i] = xs[i] * factors[i % len(factors)]


empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu


def call(args):
    """Generated code: (weight * p + sum(seen)) after the spans were read, and the pool moved on."""
    p, weight, pool, seen, spans = args
    args.clear()
    if spans[0].item() + spans[1].item() < 0:
        raise RuntimeError("negative")
    out = empty_strided_cpu(tuple(p.shape), p.stride(), p.dtype)
    cpp_scale(p, weight, out)
    pool.add_(out.sum(0))
    return (torch.add(out, seen.sum()),)


def reading(args):
    """The same, with a look at what is no part of a key."""
    return (args[0] * args[3][0].item(),)


class Fake:
    """A model of one weight, its pool, and graphs that run ``code`` as Inductor's would be."""

    def __init__(self, monkeypatch, code=call):
        self.model, self.pools, self.code = nn.Linear(3, 1, bias=False), [(torch.zeros(3),)], code
        self.instead, self.runs, self.asked = None, 0, 0
        self.replays = Replays(self.graphs, lambda: self.asked)

        @contextmanager
        def instead(run):
            self.instead = run
            yield
            self.instead = None

        monkeypatch.setattr(recording, "instead_of_generated_code", instead)

    @property
    def pool(self):
        return self.pools[0][0]

    def inputs(self, step, pool):
        p = step.tokens.view(-1, 1) * torch.tensor([0.5, -1.0, 2.0])
        return [p, self.model.weight, pool, step.seen, step.spans]

    def graphs(self, step):
        self.runs += 1
        inputs = self.inputs(step, self.pool)
        (p,) = self.instead(self.code, inputs) if self.instead else self.code(inputs)
        return p, p.new_empty(0, *p.shape)

    @torch.no_grad()
    def __call__(self, step):
        return self.replays.call(step, self.model, self.pools)[0]

    @torch.no_grad()
    def want(self, step):
        pool = self.pool.clone()
        return self.code(self.inputs(step, pool))[0], pool


def step(seen=5, slot=1, tokens=(7,)) -> Step:
    return make_step([Row(list(tokens), slot, seen, [1, 2])])


@pytest.fixture
def fake(monkeypatch):
    return Fake(monkeypatch)


def same(fake, at):
    want, pool = fake.want(at)
    assert torch.equal(fake(at), want)
    assert torch.equal(fake.pool, pool)


def settle(fake, at=None):
    """Passes up to and with the first that is replayed."""
    for _ in range(AFTER + 1):
        same(fake, at or step())


def test_after_some_passes_the_next_are_replays_and_lengths_and_tokens_may_differ(fake):
    for seen in range(5, 5 + AFTER):
        assert fake.replays.recorded == 0
        same(fake, step(seen))
    for seen in (9, 100):
        same(fake, step(seen, tokens=(seen,)))
    assert (fake.runs, fake.replays.recorded, fake.replays.replayed) == (AFTER, 1, 2)


def test_what_decides_on_the_host_is_another_recording(fake):
    for at in (step(), step(slot=2), step(tokens=(1, 2)), step()._replace(pages=torch.ones(1, 3))):
        settle(fake, at)
    assert (fake.replays.recorded, fake.replays.replayed) == (4, 4)


def test_passes_that_asked_dynamo_do_not_count(fake):
    for _ in range(3):
        fake.replays._graphs = lambda at: setattr(fake, "asked", fake.asked + 1) or fake.graphs(at)
        settle(fake)
        assert fake.replays.recorded == 0
    fake.replays._graphs = fake.graphs
    settle(fake)
    assert (fake.replays.recorded, fake.replays.replayed) == (1, 1)


def test_the_pass_before_a_recording_has_the_tensors_of_one(fake):
    """So what would be compiled for those is compiled before, never while calls are written down."""
    given, at = [], step()
    fake.replays._graphs = lambda step: given.append(step) or fake.graphs(step)
    for _ in range(AFTER):
        fake(at)
    assert [all(map(operator.is_, g, at)) for g in given] == [True] * (AFTER - 2) + [False] * 2


def test_a_result_is_not_touched_by_the_next(fake):
    results = [fake(step(tokens=(i,))) for i in range(AFTER + 2)]
    kept = copy.deepcopy(results)
    fake(step(tokens=(99,)))
    assert all(map(torch.equal, results, kept))


def test_a_changed_weight_counts_and_a_replaced_one_is_recorded_anew(fake):
    settle(fake)
    with torch.no_grad():
        fake.model.weight.mul_(3)
    same(fake, step())
    assert fake.replays.replayed == 2
    fake.model.weight.data = torch.randn(1, 3)
    same(fake, step())
    fake.model.weight = nn.Parameter(torch.randn(1, 3))
    same(fake, step())
    assert (fake.replays.recorded, fake.replays.replayed) == (3, 2)
    lies_there_otherwise = fake.model.weight.detach().as_strided((1, 3), (3, 0))
    fake.model.weight = nn.Parameter(lies_there_otherwise)
    same(fake, step())
    assert (fake.replays.recorded, fake.replays.replayed) == (4, 2)


def test_other_pools_are_recorded_anew(fake):
    settle(fake)
    first, fake.pools = fake.pool, [(torch.zeros(3),)]
    before = first.clone()
    same(fake, step())
    assert torch.equal(first, before)
    fake.pools.append((torch.zeros(3),))
    same(fake, step())
    assert (fake.replays.recorded, fake.replays.replayed) == (3, 1)


def test_few_recordings_are_kept(fake):
    for slot in (*range(1, KEPT + 3), 1):
        settle(fake, step(slot=slot))
    assert len(fake.replays._known) == KEPT
    assert fake.replays.recorded == KEPT + 3


def test_code_that_reads_lengths_is_refused_said_once_and_right(monkeypatch, caplog):
    caplog.set_level("INFO")
    fake = Fake(monkeypatch, reading)
    for seen in range(5, 8 + AFTER):
        same(fake, step(seen))
    settle(fake, step(slot=2))
    assert (fake.runs, fake.replays.recorded) == (4 + 2 * AFTER, 0)
    assert sum(fake.replays.refused.values()) == 1, "these sizes are not tried again"
    settle(fake, step(tokens=(1, 2)))
    assert sum(fake.replays.refused.values()) == 2
    assert caplog.text.count("the host reads numbers that may differ in another step") == 1


def test_lengths_that_python_reads_between_graphs_are_refused(fake):
    def graphs(step):
        torch.zeros(max(step.seen.tolist()))
        return fake.graphs(step)

    fake.replays._graphs = graphs
    settle(fake)
    assert dict(fake.replays.refused) == {"the host reads numbers that may differ in another step": 1}


def test_an_unknown_name_in_generated_code_is_refused(monkeypatch):
    def strange(args):
        return (operator.neg(args[0]),)

    fake = Fake(monkeypatch, strange)
    settle(fake)
    assert dict(fake.replays.refused) == {"generated code calls operator": 1}


# ---- with Inductor ----

MODEL = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
PAGE = 4


class Compiled:
    """One model, two sets of pools; the same steps with replays and without."""

    def __init__(self):
        self.model = small_model(MODEL, torch.float32, resident=torch.bfloat16)
        self.forward = compile_forward(self.model, self.pools(), CompileOptions())

    def pools(self):
        return self.model.make_pools(6, 30, PAGE, max_drafts=3)

    def run(self, steps, replay):
        """Hidden states of each step, and the pools at the end."""
        self.forward.pools = self.pools()
        self.replays = Replays(self.forward._graphs, self.forward.layer.through_dynamo) if replay else None
        self.forward.replays = self.replays
        hidden = [self.forward(s)[0].clone() for s in steps]
        return hidden, [t for pool in self.forward.pools for t in pool]

    def same(self, steps) -> Replays:
        (got, pools), replays = self.run(steps, True), self.replays
        want, kept = self.run(steps, False)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"step {i}"
        assert all(map(torch.equal, pools, kept))
        assert not replays.refused
        return replays


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


def decoding(slots, first, count):
    """Prompts of different lengths, then ``count`` steps of one token each."""
    pages = {slot: list(range(7 * i + 1, 7 * i + 8)) for i, slot in enumerate(slots)}
    lengths = {slot: first + i for i, slot in enumerate(slots)}
    steps = [make_step([Row(list(range(3, 3 + lengths[s])), s, 0, pages[s]) for s in slots])]
    for n in range(count):
        steps.append(make_step([Row([n + 5], s, lengths[s] + n, pages[s]) for s in slots]))
    return steps


@pytest.mark.slow
@pytest.mark.inductor
def test_decoding_has_the_bits_of_the_graphs(compiled):
    replays = compiled.same(decoding([1], 9, 12))
    assert replays.replayed == 12 - AFTER
    replays = compiled.same(decoding([2, 4, 1], 9, 8))
    assert replays.replayed == 8 - AFTER


@pytest.mark.slow
@pytest.mark.inductor
def test_what_inductor_generated_and_what_is_ours_is_called_from_one_loop(compiled):
    compiled.run(decoding([1], 9, AFTER + 1), True)
    (known,) = compiled.replays._known.values()
    together = [call for f, _ in known.replay._calls if isinstance(f, Together) for call in f.calls]
    kinds = {type(function).__name__ for function, _ in together}
    assert len(together) > 20
    assert "builtin_function_or_method" in kinds
    assert unavailable("linear") or len(kinds) == 2


@pytest.mark.slow
@pytest.mark.inductor
def test_company_that_changes(compiled):
    alone, three = decoding([1], 9, 12), decoding([1, 2, 3], 9, 12)
    steps = [three[0], *(s for pair in zip(three[1:9], alone[1:9]) for s in pair), *three[9:]]
    assert compiled.same(steps).replayed > 0


@pytest.mark.slow
@pytest.mark.inductor
def test_verified_drafts_and_short_chunks(compiled):
    pages = list(range(1, 8))
    steps = [make_step([Row([1, 2, 3, 4, 5], 1, 0, pages)])]
    for n in range(7):
        verify = Row([7, 8, 9], 1, 5, pages, verify=True)
        chunk = Row([n + 1, n + 2], 2, 2 * n, list(range(8, 15)))
        steps += [make_step([verify]), make_step([verify, chunk])]
    assert compiled.same(steps).replayed > 0


@pytest.mark.slow
@pytest.mark.inductor
def test_threads_are_part_of_a_key(compiled):
    before = torch.get_num_threads()
    steps = decoding([1], 9, 9)
    try:
        compiled.run(steps, True)
        assert compiled.replays.recorded == 1
        torch.set_num_threads(before + 1)
        assert threads() == before + 1
        for s in steps[1 : AFTER + 2]:
            compiled.forward(s)
        assert compiled.replays.recorded == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.inductor
def test_it_can_be_switched_off(compiled):
    assert CompileOptions(replay=False) != CompileOptions()
    assert CompileOptions(replay=False).canonical() == CompileOptions().canonical()
    with pytest.raises(ValueError, match="replay is 3; allowed: True, False"):
        CompileOptions(replay=3)

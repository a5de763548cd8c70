"""The job of a rank that serves the twelve requests in some way, and what it tells about it afterwards.

    pool.run(serve_way, way, known)     rank 0 serves, the others follow; what each saw by rank

Weights and compiled layers stay in a rank's memory: pools have one size whatever the way, so that what was
compiled for a set of features serves all ways with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from k3compile.runtime.config import K3Config
from k3compile.runtime.engine import Engine
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine, make_follower
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.channel import Channel, open_channel
from k3compile.runtime.parallel.follow import follow
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.parallel.ranks import Ranks, world
from k3compile.runtime.parallel.recorder import Mark, Recorder, hearing
from k3compile.runtime.speculate.dspark_model import DSparkModel
from k3compile.runtime.speculate.dspark_weights import load_draft
from k3compile.runtime.weights import load_model
from rank_traffic import CACHE, SIZES, Answer, Disturb, Known, filled, serve
from tie_aware import RouterLog, Verdict, judge, stacked

from k3compile.cli.loading import SHIPPED
from k3compile.features import FEATURES, OPTIMISATIONS
from k3compile.forward import CompiledForward, compile_forward
from k3compile.options import CompileOptions
from k3compile.serving import Serving, plan

DRAFTS = 7
WIDE = SIZES | {"max_num_batched_tokens": 256, "max_num_seqs": 12, "num_pages": 160}


@dataclass(frozen=True)
class Way:
    """How to serve. optimisations: names, compiled with those that are passes. compiled: False serves the
    model as it is written. context: ranks of a context group. drafts: "none", "ngram" or "dspark". disturb:
    what happens to request 11, see :class:`rank_traffic.Disturb`. wide: more at once.
    """

    optimisations: tuple[str, ...] = ()
    compiled: bool = True
    context: int = 1
    dtype: str = "float64"
    prefix_cache: bool = True
    drafts: str = "none"
    disturb: str = "preempt"
    few_pages: bool = False
    wide: bool = False

    def serving(self, ranks: int) -> Serving:
        """Settled as a server does it."""
        settings = self.sizes | ({"num_drafts": DRAFTS} if self.drafts != "none" else {})
        settings |= CACHE if self.prefix_cache else {}
        settings |= {"num_pages": 33} if self.few_pages else {}
        draft = SHIPPED / "draft" if self.drafts == "dspark" else None
        return plan(
            EngineConfig(**settings),
            CompileOptions(features=self.optimisations or "baseline", inner="eager", lower=self.lower),
            draft=draft,
            compiled=self.compiled,
            ranks=ranks,
            context_ranks=self.context,
        )

    @property
    def sizes(self) -> dict[str, Any]:
        return WIDE if self.wide else SIZES

    @property
    def lower(self) -> Any:
        """In float32 the router stays an op, so that a log sees what it chooses."""
        return {"route": "meaning"} if self.dtype == "float32" and self.compiled else "auto"

    @property
    def passes(self) -> tuple[str, ...]:
        """Those that rewrite something: states are written on the way for a prefix cache alone."""
        passes = (n for n in self.optimisations if FEATURES[n].by == "pass")
        return tuple(n for n in passes if n != "state_export" or self.prefix_cache)


ALL = tuple(OPTIMISATIONS)


class Seen(NamedTuple):
    """What one rank tells. collectives: of every kind with their shapes, in order. leaked: values that are
    left in pools. The rest is rank 0's: answers, what the books counted, which passes rewrote something.
    """

    collectives: list[str]
    commands: list[str]
    leaked: int
    answers: list[Answer] | None = None
    verdicts: list[Verdict] | None = None
    counted: dict[str, Any] | None = None
    applied: dict[str, int] | None = None


class Weights(NamedTuple):
    """Of one rank."""

    ranks: Ranks
    model: Model
    draft: DSparkModel


@cache
def weights(dtype: str, context: int, state_replay: bool) -> Weights:
    """Loaded once; ranks of one context size share their groups."""
    kind, ranks = getattr(torch, dtype), groups(context)
    draft = load_draft(SHIPPED / "draft", K3Config.from_file(SHIPPED), kind, ranks=ranks)
    taps = draft.config.target_layer_ids
    return Weights(
        ranks, load_model(SHIPPED, kind, tap_layers=taps, state_replay=state_replay, ranks=ranks), draft
    )


@cache
def groups(context: int) -> Ranks:
    return world(context)


@cache
def channel() -> Channel:
    return open_channel()


class Roomy:
    """A model whose pools have one size, enough for every way."""

    def __init__(self, model: Model, sizes: dict[str, Any]) -> None:
        self.real, self.config, self.num_pages = model, model.config, sizes["num_pages"]
        self.num_slots = 1 + sizes["max_num_seqs"] * (1 + DRAFTS) + CACHE["num_checkpoints"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def make_pools(self, num_slots: int, num_pages: int, page_size: int, *more: Any) -> Any:
        if num_pages < 8:
            return self.real.make_pools(num_slots, num_pages, page_size, *more)  # to be measured
        return self.real.make_pools(self.num_slots, self.num_pages, page_size, DRAFTS, self.num_slots)


_compiled: dict[tuple, CompiledForward] = {}


class Forward:
    """The forward of a way over ``pools``; rank 0's is followed by a log."""

    def __init__(self, way: Way, model: Roomy, pools: Any, options: CompileOptions) -> None:
        self.model, self.pools, self.exports, self.reports = model.real, pools, False, []
        self.run = lambda step: self.model.forward(step, pools)
        if way.compiled:
            key = (way.dtype, way.context, way.wide, self.model.state_replay, way.passes)
            if key not in _compiled:
                _compiled[key] = compile_forward(self.model, pools, options, way.sizes["max_num_seqs"])
            self.run = _compiled[key]
            self.run.pools = pools
            self.exports, self.reports = self.run.exports, self.run.reports

    def __call__(self, step: Any) -> Any:
        return self.run(step)


class Listed(Unwatched):
    """Writes down commands, and compares the digest of all collectives with rank 0's at each of them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.commands = recorder, []

    @contextmanager
    def step(self, kind: str, rows: int = 0):
        if kind != "turn":  # rank 0's own round a command
            self.commands.append(kind)
        yield

    def mark(self) -> Mark:
        return self.recorder.mark()

    def check(self, mine: Mark, leaders: Mark) -> None:
        assert mine == leaders, f"after {self.commands}: {mine} here, {leaders} on rank 0"


Work = Callable[[Engine, Serving], Any]


def on_rank(way: Way, work: Work) -> tuple[Any, Seen, Forward]:
    """Serve one way: ``work(engine, serving)`` on rank 0, obedience elsewhere. All ranks call it together."""
    made = way.serving(dist.get_world_size())
    own = weights(way.dtype, way.context, made.engine.state_replay)
    draft = own.draft if way.drafts == "dspark" else None
    model, ours, forwards, result = Roomy(own.model, way.sizes), channel(), [], None

    def forward(model: Roomy, pools: Any) -> Forward:
        forwards.append(Forward(way, model, pools, made.options))
        return forwards[-1]

    recorder = Recorder(kept=1 << 20)
    watch = Listed(recorder)
    with torch.no_grad(), hearing(recorder):
        if own.ranks.rank:
            executor = make_follower(model, made.engine, forward, draft)
            recorder.__init__(1 << 20)  # the ranks agree from here on; what is compiled differs in nothing
            follow(executor, ours, watch)
            pools = executor.pools
        else:

            def lead(executor: Any) -> Any:
                recorder.__init__(1 << 20)
                return Leader(executor, ours, watch) if own.ranks.size > 1 else executor

            engine = make_engine(model, made.engine, forward, draft, lead=lead)
            result, pools = work(engine, made), engine.pools
            if engine.alive:
                give_back(engine)
            engine.stop()
    seen = Seen([entry.text for entry in recorder.entries()], watch.commands, filled(pools))
    return result, seen, forwards[-1]


def give_back(engine: Engine) -> None:
    """Let go of all prefixes, when nothing runs: then every page and slot is NaN on every rank, as freed ones
    are. Reaches the other ranks with the next command.
    """
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.pages_used == stats.slots_used == 0
    engine.cache.check()
    engine.cache.drop()
    engine.cache.check()
    engine.executor.write(engine.cache.take_writes())


def serve_way(way: Way, known: Sequence[Known]) -> Seen:
    """The job: serve the known requests."""
    hook = Disturb(way.disturb)
    log = RouterLog() if way.dtype == "float32" and dist.get_rank() == 0 else None
    asks, prompts = [one.ask for one in known], [one.prompt for one in known]
    counted: dict[str, Any] = {}

    def work(engine: Engine, serving: Serving) -> list[Answer]:
        if log is not None:
            watch_routes(engine, log)
        answers = serve(engine, asks, prompts, hook if len(asks) > 11 else None)
        stats = engine.stats()
        counted.update(
            hits=stats.prefix_hit_tokens,
            preempted=stats.preemptions,
            proposed=sum(stats.drafts_proposed),
            accepted=sum(stats.drafts_accepted),
            steps=stats.steps,
        )
        return answers

    with log.watching() if log is not None else nullcontext():
        answers, seen, forward = on_rank(way, work)
    if answers is None:
        return seen
    verdicts = None
    if log is not None:
        chosen = [stacked(log.experts[str(index)]) for index in range(len(known))]
        runs = zip(known, answers, chosen)
        verdicts = [judge(one.reference, got.tokens, experts) for one, got, experts in runs]
    applied = {name: sum(report.applied(name) for report in forward.reports) for name in way.passes}
    return seen._replace(answers=answers, verdicts=verdicts, counted=counted, applied=applied)


def watch_routes(engine: Engine, log: RouterLog) -> None:
    """Let ``log`` see what rank 0's forward chose, without another forward, which the others had not."""
    forward = engine.executor.forward
    run = forward.run

    class Stand:
        _forward, cache = staticmethod(run), engine.cache

        @staticmethod
        def use(logged: Callable) -> None:
            forward.run = logged

    log.attach(Stand)


def logits_of(dtype: str, context: int, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The job: logits [T, V] of whole prompts, as the model is written."""
    from small_models import Row, make_step

    model, found = weights(dtype, context, True).model, []
    for prompt in prompts:
        pages = list(range(1, -(-len(prompt) // 16) + 1))
        pools = model.make_pools(2, len(pages) + 1, 16, 0)
        with torch.no_grad():
            hidden, _ = model.forward(make_step([Row(prompt, slot=1, pages=pages)]), pools)
            found.append(model.logits(hidden))
    return found

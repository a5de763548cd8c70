"""Serves the twelve requests with any set of features, and tells which features were seen at work.

    Lab       a small K3 in float64, what each request must answer alone, and compiled forwards by passes
    Serving   one engine with one set of features: run() -> Seen
    Seen      answers, and counts taken outside of the engine where that is possible

Pools have one size whatever the features, so that a compiled forward serves every set with its passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from features_traffic import BLOCK, DRAFTS, PAGE, ROWS, SEQS, UNIT, Ask, Known, Oracle, request_of, traffic
from k3compile.runtime.engine import Engine, Update
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.model import Model
from small_models import SMALL, small_model

from k3compile.features import FEATURES, OPTIMISATIONS
from k3compile.forward import CompiledForward, compile_forward
from k3compile.options import CompileOptions
from k3compile.serving import plan

SHAPE = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 3))  # three kinds of layer
PASSES = tuple(n for n in OPTIMISATIONS if FEATURES[n].by == "pass")
SIZES = {
    "max_num_batched_tokens": ROWS,
    "max_num_seqs": SEQS,
    "page_size": PAGE,
    "num_pages": 120,
    "max_model_len": 320,
    "poison": True,
}
CACHE = {"prefix_cache": True, "prefix_match_unit": UNIT, "block_size": BLOCK, "num_checkpoints": 8}
SPECULATE = {"num_drafts": DRAFTS}
OFFLOAD = {"num_checkpoints": 5, "offload_host_bytes": 8 << 20}  # so few that most are pushed out
NUM_SLOTS = 1 + SEQS * (1 + DRAFTS) + CACHE["num_checkpoints"]  # as many as any set needs
STATIC_ROWS = ROWS - SEQS * (DRAFTS - 1)  # of a step without adaptive_budget
Hook = Callable[[Engine, int], None]  # called after each step with its number


@dataclasses.dataclass
class Seen:
    """What came out of a run and what was seen in it; lists are by request."""

    answers: list[list[int]]
    finish: list[str | None]
    cached: list[int]
    steps: int = 0
    most_rows: int = 0  # of one step
    exports: int = 0  # states written inside a pass
    verified: int = 0  # rows of drafts
    scratched: int = 0  # of them, those with a slot for each candidate state
    beyond: int = 0  # tokens that came beside the first one of a step
    loaded: int = 0  # tokens that came from a tier, which are cached ones too
    rewritten: frozenset[str] = frozenset()  # passes that rewrote something

    def acted(self) -> set[str]:
        """The features that were seen at work."""
        signs = {
            "prefix_cache": sum(self.cached) > self.loaded,
            "speculate": self.beyond > 0,
            "offload": self.loaded > 0,
            "state_export": self.exports > 0,
            "adaptive_budget": self.verified > 0 and self.most_rows > STATIC_ROWS,
            "state_replay": self.verified > 0 and self.scratched == 0,
        }
        return {name for name, sign in signs.items() if sign} | (self.rewritten - {"state_export"})


class Roomy:
    """A model whose pools are always as large as the largest set of features needs."""

    def __init__(self, model: Model) -> None:
        self.real, self.config = model, model.config
        self.forward, self.logits = model.forward, model.logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def make_pools(self, num_slots: int, num_pages: int, page_size: int, *rest: Any, **more: Any) -> Any:
        if num_pages < SIZES["num_pages"]:
            return self.real.make_pools(num_slots, num_pages, page_size, *rest, **more)  # to be measured
        return self.real.make_pools(NUM_SLOTS, num_pages, page_size, DRAFTS)


class Watched:
    """A forward whose steps are counted."""

    def __init__(self, forward: Callable, seen: Seen) -> None:
        self.forward, self.seen = forward, seen
        self.exports = getattr(forward, "exports", False)

    def __call__(self, step: Any) -> Any:
        seen, verified = self.seen, len(step.cu_verify) - 1
        seen.steps += 1
        seen.most_rows = max(seen.most_rows, len(step.tokens))
        seen.exports += int((step.export_offset > 0).sum())
        seen.verified += verified
        seen.scratched += int((step.scratch > 0).any(1).sum()) if verified else 0
        return self.forward(step)


class Lab:
    """What the sets of features have in common: weights, expected answers, compiled forwards."""

    def __init__(self, inner: str = "aot_eager") -> None:
        self.inner = inner
        self._models: dict[bool, Roomy] = {}
        self._forwards: dict[tuple, CompiledForward] = {}
        self.known = alone(self.model(True).real, traffic())

    def model(self, state_replay: bool) -> Roomy:
        if state_replay not in self._models:
            self._models[state_replay] = Roomy(small_model(SHAPE, state_replay=state_replay))
        return self._models[state_replay]

    def forward(self, model: Roomy, pools: Any, options: CompileOptions, passes: Iterable[str]) -> Callable:
        """The model as it is written where no pass is wanted, else compiled, once for each set of passes."""
        if not (passes := tuple(sorted(passes))):
            return lambda step: model.forward(step, pools)
        key = model.real.state_replay, passes
        if key not in self._forwards:
            self._forwards[key] = compile_forward(model.real, pools, options, SEQS)
        made = self._forwards[key]
        made.pools = pools
        return made


def alone(model: Model, asks: Sequence[Ask]) -> list[Known]:
    """Each request by itself, in one pass, without any feature: what every other way must equal."""
    config = EngineConfig(max_num_batched_tokens=1024, max_num_seqs=1, max_model_len=320, poison=True)
    known: list[Known] = []
    for ask in asks:
        before = [] if ask.turn_of is None else known[ask.turn_of].prompt + known[ask.turn_of].answer
        known.append(Known(ask, before + ask.tokens, answer_of(make_engine(model, config), before, ask)))
    return known


def answer_of(engine: Engine, before: list[int], ask: Ask) -> list[int]:
    answer: list[int] = []
    engine.submit(request_of(0, before + ask.tokens, ask), lambda update: answer.extend(update.tokens))
    while engine.step():
        pass
    return answer


def config_of(features: Iterable[str], **more: Any) -> EngineConfig:
    """The capabilities among ``features``; the optimisations are set by :func:`k3compile.serving.plan`."""
    fields = dict(SIZES)
    for name, own in (("prefix_cache", CACHE), ("speculate", SPECULATE), ("offload", OFFLOAD)):
        fields |= own if name in features else {}
    return EngineConfig(**(fields | more))


class Server:
    """One engine with one set of features, and its run over the traffic.

    drafter: what proposes where ``speculate`` is among them (None: an Oracle).
    """

    def __init__(self, lab: Lab, features: Iterable[str], drafter: Any = None, **config: Any) -> None:
        self.lab, self.features = lab, frozenset(features)
        optimised = tuple(n for n in OPTIMISATIONS if n in self.features)
        made = plan(
            config_of(self.features, **config),
            CompileOptions(features=optimised or "baseline", inner=lab.inner),
        )
        assert {n for n, setting in made.settings.items() if setting.on} == self.features
        count = len(lab.known)
        self.seen = Seen([[] for _ in range(count)], [None] * count, [0] * count)
        passes = self.features & set(PASSES)
        self.errors: list[str] = []

        def forward(model: Roomy, pools: Any) -> Watched:
            compiled = lab.forward(model, pools, made.options, passes)
            reports = getattr(compiled, "reports", [])
            did = {name for name in passes if any(report.applied(name) for report in reports)}
            self.seen.rewritten = frozenset(did)
            return Watched(compiled, self.seen)

        if "speculate" in self.features:
            drafter = drafter or Oracle(lab.known)
        self.engine = make_engine(lab.model(made.engine.state_replay), made.engine, forward, None, drafter)

    def run(self, hook: Hook | None = None, most_steps: int = 400) -> Seen:
        """Serve everything; free pages and slots hold NaN, and the books are walked after every step."""
        engine, seen, known = self.engine, self.seen, self.lab.known
        waiting, ended = set(range(len(known))), {}  # ended: request -> number of the step
        step = 0
        while waiting or len(ended) < len(known):
            assert step < most_steps, (
                f"after {step} steps these have not ended: {set(range(12)) - set(ended)}"
            )
            for index in sorted(waiting):
                if due(known[index].ask, ended, step):
                    waiting.discard(index)
                    if known[index].ask.after and engine.tiers is not None:
                        assert engine.tiers.drain(60), "what it may find in a tier is there"
                    engine.submit(request_of(index, known[index].prompt, known[index].ask), self.listen)
            engine.step()
            if hook is not None:
                hook(engine, step)
            engine.cache.check()
            step += 1
            for index, finish in enumerate(seen.finish):
                if finish is not None:
                    ended.setdefault(index, step)
        self.close()
        return seen

    def listen(self, update: Update) -> None:
        index, seen = int(update.request_id), self.seen
        seen.answers[index] += update.tokens
        seen.cached[index] = update.cached_tokens
        seen.beyond += max(len(update.tokens) - 1, 0)
        seen.finish[index] = update.finish
        if update.error:
            self.errors.append(f"request {index}: {update.error}")

    def close(self) -> None:
        """The engine's end: nothing failed, nothing is left."""
        engine, stats = self.engine, self.engine.stats()
        assert not self.errors, self.errors
        assert engine.speculation.error is None
        engine.stop()
        engine.cache.check()
        assert stats.running == stats.waiting == stats.pages_used == stats.slots_used == 0
        self.seen.loaded = stats.offload.loaded_tokens if stats.offload else 0


def due(ask: Ask, ended: dict[int, int], step: int) -> bool:
    """Whether a request comes before step number ``step``."""
    if any(other not in ended for other in ask.after):
        return False
    return step >= max((ended[other] for other in ask.after), default=0) + ask.arrival


class Preempt:
    """Throws every running request out after one step; a hook. ``hit``: how many that were."""

    def __init__(self, step: int) -> None:
        self.step, self.hit = step, 0

    def __call__(self, engine: Engine, step: int) -> None:
        if step == self.step:
            for request in list(engine.scheduler.running):
                engine.scheduler.preempt(request)
                self.hit += 1


class Abort:
    """Ends one running request after one step, or a waiting one; a hook. ``hit``: which it was."""

    def __init__(self, step: int) -> None:
        self.step, self.hit = step, set()

    def __call__(self, engine: Engine, step: int) -> None:
        inside = [*engine.scheduler.running, *engine.scheduler.waiting]
        if step == self.step and inside:
            victim = inside[step % len(inside)].id
            engine.abort(victim)
            self.hit.add(int(victim))


def same(lab: Lab, seen: Seen, aborted: Iterable[int] = ()) -> None:
    """Every answer is the one that its request gets alone; an aborted one may stop early."""
    cut = set(aborted)
    for index, (one, got) in enumerate(zip(lab.known, seen.answers, strict=True)):
        expected = one.answer[: len(got)] if index in cut else one.answer
        assert got == expected, f"request {index} got {got}, alone it gets {one.answer}"

"""A pass of few rows, as the list of calls that the compiled model makes: kernels with their arguments.

    at first        the graphs, as always
    AFTER times     the graphs, on a step of ours, while their calls are written down    recording.py
    from then on    values into that step, then the calls one after another              Replay

For one token most of a pass's time on a CPU goes to what surrounds its kernels: modules, buffers, views,
checks, the dispatcher. All of it comes out the same while the sizes are the same and the tensors lie where
they lay. The numbers that decide it on the host (row counts, slots, checkpoints) are the key of a recording.
Lengths and pages are not: an op that reads them on the host is called again as an op. A pass that does what
a list of calls would not do again (a collective, say) runs its graphs, and ``refused`` says why.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .kernels.native import alone, threads
from .program import Call, run, shortened
from .recording import Recording
from .runtime.step import Step

log = logging.getLogger(__name__)
Pass = Callable[[Step], tuple[Tensor, ...]]

AFTER = 5  # passes of the same key: to write one down takes as much more time as so many replays save
KEPT = 4  # recordings of a model; each holds the buffers of one pass over it
FIXED = ("spans", "cu_verify", "cu_other", "slots", "scratch", "anchor", "export_offset", "export_slot")
LIVE = ("tokens", "seen", "pages")


class Held:
    """The tensors that a pass reads and advances beside its step: of modules, by name, and pools."""

    def __init__(self, model: nn.Module, pools: Iterable[Iterable[Tensor]]) -> None:
        self._at = [(of, name) for m in model.modules() for of in (m._parameters, m._buffers) for name in of]
        self._tensors = self._now(pools)
        self._addresses = addresses_of(self._tensors)

    def fits(self, pools: Iterable[Iterable[Tensor]]) -> bool:
        """Whether the same tensors are there, where they lay; weights can be replaced."""
        now = self._now(pools)
        return all(map(is_, now, self._tensors)) and addresses_of(now) == self._addresses

    def _now(self, pools: Iterable[Iterable[Tensor]]) -> list[Tensor | None]:
        return [of.get(name) for of, name in self._at] + [t for layer in pools for t in layer]


def addresses_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Where each lies; 0 for None."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def copied(step: Step) -> Step:
    """The same values, in tensors of ours."""
    return Step(*(t.clone() for t in step))


class Replay:
    """One pass, on a step of its own: FIXED tensors have the key's values, LIVE ones are filled."""

    def __init__(self, step: Step, held: Held) -> None:
        self.step, self.held = copied(step), held
        self._calls: list[Call] = []
        self._kept: list[Any] = []  # what the calls point to
        self._results: tuple[Tensor, ...] = ()

    def fill(self, step: Step) -> None:
        """Take over the values of ``step``, which has the same key."""
        for name in LIVE:
            getattr(self.step, name).copy_(getattr(step, name))

    def record(self, graphs: Pass) -> str:
        """Run ``graphs`` and write down what they do; why that cannot be repeated, or an empty string."""
        recording = Recording([getattr(self.step, name) for name in FIXED])
        with recording.everything():
            self._results = graphs(self.step)
        self._calls, self._kept = shortened(recording.calls), recording.kept
        return recording.refused

    def __call__(self) -> tuple[Tensor, ...]:
        """What the pass returns for the values that were filled in; pools are advanced."""
        with alone:
            run(self._calls)
        return self.results()

    def results(self) -> tuple[Tensor, ...]:
        """Those of the last pass, for a caller to keep."""
        return tuple(t.clone() for t in self._results)


class Known:
    """What is known of a key: passes that ran as they would again, then a step of ours, then a recording."""

    passes = 0
    replay: Replay | None = None


class Replays:
    """The recordings of a model. For one thread, which is the one that runs the model.

    graphs: a pass over a step. compiled: a number that rises when a pass compiles, or asks whether it has to.
    recorded, replayed: passes. refused: sizes that always run their graphs, by reason.
    """

    def __init__(self, graphs: Pass, compiled: Callable[[], int]) -> None:
        self.recorded = self.replayed = 0
        self.refused: Counter[str] = Counter()
        self._graphs, self._compiled = graphs, compiled
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
        self._never: set[Hashable] = set()

    def call(self, step: Step, model: nn.Module, pools: Iterable[Iterable[Tensor]]) -> tuple[Tensor, ...]:
        """What ``graphs(step)`` returns, which runs ``model`` on ``pools``."""
        sizes = tuple(t.shape for t in step), threads(), torch.is_inference_mode_enabled()
        if sizes in self._never:
            return self._graphs(step)
        key = sizes, tuple(str(getattr(step, name).tolist()) for name in FIXED)
        known = self._known.pop(key, None) or Known()
        self._known[key] = known  # as the last that was used
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        replay = known.replay
        if replay is not None and replay.held.fits(pools):
            replay.fill(step)
            self.replayed += 1
            return replay()
        if known.passes < AFTER - 1:
            return self._not_yet(known, step)
        replay = Replay(step, Held(model, pools))
        if refused := replay.record(self._graphs):
            self._refuse(refused, key, sizes)
        else:
            known.replay = replay
            self.recorded += 1
        return replay.results()

    def _not_yet(self, known: Known, step: Step) -> tuple[Tensor, ...]:
        """A pass by the graphs; the last before a recording is on a step of ours, as that will be."""
        before = self._compiled()
        if known.passes == AFTER - 2:
            step = copied(step)
        result = self._graphs(step)
        known.passes = known.passes + 1 if self._compiled() == before else 0
        return result

    def _refuse(self, why: str, key: Hashable, sizes: Hashable) -> None:
        del self._known[key]
        self._never.add(sizes)
        self.refused[why] += 1
        if self.refused[why] == 1:
            log.info("few rows run the graphs of layers, call by call: %s", why)

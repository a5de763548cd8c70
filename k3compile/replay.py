"""A layer at a few rows, as the list of calls that its compiled graph makes: kernels with their arguments.

    at first        the graph, as always
    AFTER times     the graph, on tensors of ours, while its calls are written down      recording.py
    from then on    values into those tensors, then the calls one after another          Replay

For one token most of a layer's time on a CPU goes to what surrounds its kernels: buffers, views, checks, the
dispatcher. All of it comes out the same while the sizes are the same and the tensors lie where they lay. The
numbers that decide it on the host (row counts, slots, checkpoints) are the key of a recording. Lengths and
pages are not: an op that reads them on the host is called again as an op. A layer that does what a list of
calls would not do again (a collective, say) runs its graph, and ``refused`` says why.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from .kernels.native import threads
from .recording import Call, Recording
from .runtime.step import Step

log = logging.getLogger(__name__)
Graph = Callable[..., Any]
Inputs = Callable[..., tuple]

AFTER = 4  # passes of the same key: to write one down takes as much more time as so many replays save
KEPT = 4  # recordings of a layer; each holds the buffers of one pass over it
FIXED = ("spans", "cu_verify", "cu_other", "slots", "scratch", "anchor", "export_offset", "export_slot")
LIVE = ("tokens", "seen", "pages")


class Still:
    """A step whose tensors stay where they are: FIXED ones have the key's values, LIVE ones are filled."""

    def __init__(self, step: Step) -> None:
        self.step = Step(*(t.clone() for t in step))
        self._of: Step | None = step

    def fill(self, step: Step) -> None:
        """Take over the values of ``step``, which has the same key."""
        if self._of is not step:
            for name in LIVE:
                getattr(self.step, name).copy_(getattr(step, name))
            self._of = step


class Replay:
    """One pass over one layer, on tensors of its own."""

    def __init__(self, still: Still, p: Tensor, blocks: Tensor) -> None:
        self.still, self.p, self.blocks = still, p, blocks
        self._calls: list[Call] = []
        self._kept: list[Any] = []  # what the calls point to
        self._inputs: list[Tensor] = []
        self._addresses: list[int] = []
        self._result = p

    def record(self, graph: Graph, inputs: tuple, step: Step) -> tuple[Tensor, str]:
        """Run ``graph`` and write down what it does; its result, and why that cannot be repeated, if so.

        inputs: of the graph, with our own tensors among them. step: whose values those have.
        """
        fixed = [getattr(s, name) for s in (self.still.step, step) for name in FIXED]
        recording = Recording(fixed)
        with recording.everything():
            result = graph(*inputs)[0]
        self._calls, self._kept, self._result = recording.calls, recording.kept, result
        self._inputs = [t for t in inputs if isinstance(t, Tensor)]
        self._addresses = [t.data_ptr() for t in self._inputs]
        return result, recording.refused

    def fits(self, inputs: tuple) -> bool:
        """Whether the graph would be given the same tensors, where they lay; weights can be replaced."""
        now = [t for t in inputs if isinstance(t, Tensor)]
        same = len(now) == len(self._inputs) and all(map(is_, now, self._inputs))
        return same and [t.data_ptr() for t in now] == self._addresses

    def __call__(self, p: Tensor, blocks: Tensor) -> Tensor:
        """What the layer makes of ``p`` and ``blocks``; its pools are advanced."""
        self.p.copy_(p)
        self.blocks.copy_(blocks)
        for function, args in self._calls:
            function(*args)
        return self._result.clone()


class Replays:
    """The recordings of a model's layers. For one thread, which is the one that runs the model.

    recorded, replayed: passes over a layer. refused: layers that always run their graph, by reason.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.refused: Counter[str] = Counter()
        self._of: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Replay | int]] = WeakKeyDictionary()
        self._never: WeakSet[nn.Module] = WeakSet()
        self._stills: WeakValueDictionary[Hashable, Still] = WeakValueDictionary()
        self._step: tuple[Step | None, Hashable] = (None, None)

    def call(
        self,
        graph: Graph,
        inputs: Inputs,
        layer: nn.Module,
        p: Tensor,
        blocks: Tensor,
        pools: Any,
        step: Step,
    ) -> Tensor:
        """What ``graph(*inputs(layer, p, blocks, pools, step))[0]`` returns."""
        if p.device.type != "cpu" or torch.is_grad_enabled() or layer in self._never:
            return graph(*inputs(layer, p, blocks, pools, step))[0]
        of_step = self._key(step)
        key = p.shape[0], blocks.shape[0], of_step
        known = self._of.setdefault(layer, OrderedDict())
        replay = known.pop(key, 0)
        known[key] = replay  # as the last that was used
        if isinstance(replay, Replay):
            if replay.fits(inputs(layer, replay.p, replay.blocks, pools, replay.still.step)):
                replay.still.fill(step)
                self.replayed += 1
                return replay(p, blocks)
        elif replay < AFTER - 1:
            known[key] = replay + 1
            while len(known) > KEPT:
                known.popitem(last=False)
            return graph(*inputs(layer, p, blocks, pools, step))[0]
        replay = Replay(self._still(of_step, step), p.clone(), blocks.clone())
        given = inputs(layer, replay.p, replay.blocks, pools, replay.still.step)
        result, refused = replay.record(graph, given, step)
        if refused:
            del self._of[layer]
            self._never.add(layer)
            self.refused[refused] += 1
            if self.refused[refused] == 1:
                log.info("few rows run the graph of a layer, call by call: %s", refused)
            return result
        known[key] = replay
        self.recorded += 1
        return result.clone()

    def forget(self, layer: nn.Module) -> None:
        """Drop what was recorded of ``layer``, as when another graph is to run it."""
        self._of.pop(layer, None)
        self._never.discard(layer)

    def _still(self, key: Hashable, step: Step) -> Still:
        """The step of this key whose tensors stay, with the values of ``step``."""
        still = self._stills.get(key)
        if still is None:
            still = self._stills[key] = Still(step)
        still.fill(step)
        return still

    def _key(self, step: Step) -> Hashable:
        """All that decides on the host what a pass over ``step`` does; looked at once for all layers."""
        of, key = self._step
        if of is not step:
            values = tuple(str(getattr(step, name).tolist()) for name in FIXED)
            shapes = tuple(tuple(getattr(step, name).shape) for name in LIVE)
            key = values, shapes, threads(), torch.is_inference_mode_enabled()
            self._step = step, key
        return key

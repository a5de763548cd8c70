"""The error rule: an implementation is at most 1.1 times as far from float64 as its op's meaning.

    a sample --meaning in float64--> the truth
             --meaning-------------> its own error: what the dtype costs
             --implementation------> no further off than 1.1 times that, over all draws taken together,
                                     and no element of any sample by more than the op's tolerance

A single sample has few numbers and its ratio is chance; squares are summed over many draws, for each result
and each written argument by itself. Integers are equal. An implementation with a tolerance of its own, which
is only for users who name it, is held against that alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.op import Implementation, Op, Tolerance
from ..kernels.samples import drawn
from .rooms import Room, aligned, moved_in

ALLOWED = 1.1  # times the meaning's own error
DRAWS = 20
UNFUSED = ("latent_tail",)  # held against the chain of ops it replaces, which rounds in between
ENOUGH = 20_000  # numbers of a result, after which no more are drawn: their error is known to a percent


@dataclass
class Distance:
    """How far one result of an op was from float64, over all calls so far: sums of squares, of the
    implementation (ours) and of the meaning, each relative to the result's own mean square.
    """

    ours: float = 0.0
    meaning: float = 0.0
    numbers: int = 0

    @property
    def ratio(self) -> float:
        """Of the two errors; 1 where both are exact."""
        if self.ours == self.meaning:
            return 1.0
        return (self.ours / self.meaning) ** 0.5 if self.meaning else float("inf")


@dataclass
class Verdict:
    """What was found for one implementation in one dtype. calls: those it ran; refused: why not the others.

    worst: the largest error as a share of the tolerance. coarse: that is its own and not the op's.
    """

    op: str
    provider: str
    dtype: str
    calls: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    distances: dict[str, Distance] = field(default_factory=dict)
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)
    coarse: bool = False

    @property
    def complaints(self) -> list[str]:
        """All that is wrong, the rule over all draws included."""
        if self.coarse:
            return self.wrong
        above = [
            f"{name}: error {d.ratio:.3f} times that of the meaning, at most {ALLOWED} is allowed"
            for name, d in self.distances.items()
            if d.ratio > ALLOWED
        ]
        return [*self.wrong, *above]

    @property
    def ratio(self) -> float:
        """The largest of all results."""
        return max((d.ratio for d in self.distances.values()), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "complaints": self.complaints}


def names_of(op: Op) -> list[str]:
    """The op's arguments, in order."""
    return [a.name for a in op.overload._schema.arguments]


def outcome(op: Op, fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """What ``fn(*args)`` returns, and after it the arguments that the op writes."""
    returned = fn(*args)
    results = [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]
    return [*results, *(args[names_of(op).index(name)] for name in op.writes)]


def tolerance_of(op: Op, provider: str) -> Tolerance:
    """Its own where it is coarser than its op and only for users who name it, else the op's."""
    return op.implementations[provider].tolerance or op.tolerance


def result_names(op: Op, count: int) -> list[str]:
    """Names for what :func:`outcome` gives, ``count`` of them."""
    returned = count - len(op.writes)
    return [*(f"result {i}" if returned > 1 else "result" for i in range(returned)), *op.writes]


def samples_of(op: Op, dtype: torch.dtype, number: int) -> list[tuple]:
    """The op's samples with the values of one draw."""
    with drawn(number):
        return list(op.each_sample(dtype))


def fitting(implementation: Implementation, args: Sequence[Any]) -> tuple[list[Any], str | None]:
    """The arguments, with aligned rows where only those are taken, and the objection that is left."""
    if implementation.objection(*args) is None:
        return list(args), None
    moved = aligned(args)
    return moved, implementation.objection(*moved)


def check(
    op: Op,
    provider: str,
    dtype: torch.dtype,
    numbers: Iterable[int] = range(DRAWS),
    device: torch.device | str = "cpu",
) -> Verdict:
    """Hold an implementation against the rule, over these draws of the op's samples, or as many of them as
    have numbers enough. It runs on ``device``, the meaning on the CPU.
    """
    found = Verdict(op.name, provider, str(dtype).removeprefix("torch."))
    found.coarse = op.implementations[provider].asked_for
    for number in numbers:
        for args in samples_of(op, dtype, number):
            check_call(found, op, args, dtype, device)
        if found.distances and min(d.numbers for d in found.distances.values()) >= ENOUGH:
            break
    return found


def check_call(
    found: Verdict, op: Op, args: Sequence[Any], dtype: torch.dtype, device: torch.device | str
) -> None:
    """One call, added to what was found."""
    implementation = op.implementations[found.provider]
    fit, why = fitting(implementation, moved_in(args, device)[0])
    if why is not None:
        found.refused[why] += 1
        return
    inside, rooms = moved_in(fit, device)
    got = outcome(op, implementation.fn, inside)
    note_disturbed(found, rooms)
    judge(found, op, args, dtype, got)
    found.calls += 1


def note_disturbed(found: Verdict, rooms: Sequence[Room]) -> None:
    count = sum(room.disturbed() for room in rooms)
    if count:
        found.wrong.append(f"{count} elements beside the arguments were written")


def judge(found: Verdict, op: Op, args: Sequence[Any], dtype: torch.dtype, got: Sequence[Tensor]) -> None:
    """Add one call's results to what was found. The meaning runs where ``args`` are."""
    truth = outcome(op, op.meaning, moved_in(args, args_device(args), wide=True)[0])
    reference = op.open_form if op.name in UNFUSED else op.meaning
    own = outcome(op, reference, moved_in(args, args_device(args))[0])
    for name, g, m, t in zip(result_names(op, len(truth)), got, own, truth, strict=True):
        g = g.to(t.device)
        if complaint := judge_one(found, name, g, m, t, tolerance_of(op, found.provider).of(dtype)):
            found.wrong.append(f"{name} {tuple(t.shape)}: {complaint}")


def args_device(args: Sequence[Any]) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))


def judge_one(found: Verdict, name: str, got: Tensor, meaning: Tensor, truth: Tensor, bound: float) -> str:
    """One result; what is wrong with it alone, or nothing."""
    if got.shape != truth.shape:
        return f"has the shape {tuple(got.shape)}"
    if not truth.is_floating_point():
        differ = int((got != truth).sum())
        return f"{differ} integers differ" if differ else ""
    live = torch.isfinite(truth)
    if not torch.isfinite(got[live]).all():
        return f"{int((~torch.isfinite(got[live])).sum())} values are not finite: never written, or of poison"
    if not live.any():
        return ""
    exact = truth[live]
    ours, own = got[live].double() - exact, meaning[live].double() - exact
    size = exact.square().mean().item()
    distance = found.distances.setdefault(name, Distance())
    distance.numbers += exact.numel()
    distance.ours += ours.square().sum().item() / (size or 1.0)
    distance.meaning += own.square().sum().item() / (size or 1.0)
    off, most = ours.abs().max().item(), exact.abs().max().item()
    found.worst = max(found.worst, off / (bound * most) if most else 0.0)
    return f"off by {off:.3g} of {most:.3g}, the tolerance is {bound:g}" if off > bound * most else ""

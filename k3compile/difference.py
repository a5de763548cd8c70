"""What two runs of a graph disagree in: results, written inputs, shared memory, the size of rounding errors.

Errors of one run often share a cause, as when one rounding moves a whole row, so a norm over a few values
scatters widely between draws. That is why several runs can be judged together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

GROWTH = 1.1  # by how much the error of a numeric pass may exceed that of the graph it was given
SCATTER = 3.0  # the norm of n rounding errors is a draw itself, the wider the fewer they are


@dataclass(frozen=True)
class Observed:
    """One run of a graph: its results and its inputs as they are afterwards, and which of them share memory.

    values: name -> tensor or number, in a fixed order. shared: pairs of names that sit in one storage.
    """

    values: dict[str, Any]
    shared: frozenset[tuple[str, str]]


class Compared(NamedTuple):
    """Runs on the same inputs: before a pass, after it, and before it in float64 if rounding may differ."""

    want: Observed
    got: Observed
    reference: Observed | None = None


def differences(runs: Sequence[Compared]) -> list[str]:
    """What differs, as sentences. With references rounding may differ, or else nothing may.

    Each run has to agree in everything but rounding, and the rounding errors of all runs are judged together.
    """
    want, got, problems = runs[0].want, runs[0].got, []
    for name in want.values:
        if name not in got.values:
            problems.append(f"{name} is gone")
            continue
        triples = [
            (run.want.values[name], run.got.values[name], run.reference and run.reference.values[name])
            for run in runs
        ]
        why = next((said for triple in triples if (said := difference(*triple))), None)
        if why := why or larger_errors([t for t in triples if may_round(t[0], t[2])]):
            problems.append(f"{name} {why}")
    if extra := [n for n in got.values if n.startswith("output") and n not in want.values]:
        problems.append(f"there are more results: {', '.join(extra)}")
    mine = {pair for pair in got.shared if all(n in want.values for n in pair)}
    for gone in sorted(want.shared - mine):
        problems.append(f"{gone[0]} and {gone[1]} no longer share memory")
    for new in sorted(mine - want.shared):
        problems.append(f"{new[0]} and {new[1]} now share memory")
    return problems


def difference(want: Any, got: Any, reference: Any) -> str | None:
    """Why ``got`` is not ``want``, rounding errors apart if there is a ``reference``; or None."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if type(want) is type(got) and want == got else f"was {want} and is {got}"
    if (want.shape, want.dtype, want.device) != (got.shape, got.dtype, got.device):
        return f"was {looks(want)} and is {looks(got)}"
    if want.layout != torch.strided or want.numel() == 0:
        return None
    a, b = want.detach(), got.detach()
    if not a.is_floating_point() and not a.is_complex():
        return None if torch.equal(a, b) else biggest(a, b)
    if not same_pattern(a, b):
        return "has NaN or infinity elsewhere: " + biggest(a, b)
    return None if may_round(a, reference) or equal(a, b) else biggest(a, b)


def may_round(want: Any, reference: Any) -> bool:
    """Whether a value of another run is judged by its distance from ``reference``."""
    floats = isinstance(want, torch.Tensor) and want.is_floating_point() and want.layout == torch.strided
    return floats and want.numel() > 0 and reference is not None


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits of the values are the same; NaN equals NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def larger_errors(triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> str | None:
    """Why ``got`` of (want, got, reference) is further from it than ``want``, over all; or None."""
    if not triples:
        return None
    before, after, size = (
        math.sqrt(sum(error_norm(t, reference) ** 2 for t, reference in pairs))
        for pairs in zip(*[((a, r), (b, r), (torch.zeros_like(a), r)) for a, b, r in triples])
    )
    a, b, _ = triples[0]
    growth = GROWTH * (1 + SCATTER / math.sqrt(sum(a.numel() for a, _, _ in triples)))
    allowed = max(growth * before, torch.finfo(a.dtype).eps / 2 * size)
    if after <= allowed:
        return None
    runs = f" over {len(triples)} runs" if len(triples) > 1 else ""
    return (
        f"is {after:.3e} from float64{runs}, where {before:.3e} was and {allowed:.3e} may be: {biggest(a, b)}"
    )


def same_pattern(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether NaN and the infinities stand in the same places."""
    infinite = a.isinf()
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(infinite, b.isinf())
        and torch.equal(a[infinite], b[infinite])
    )


def error_norm(t: torch.Tensor, reference: torch.Tensor) -> float:
    """The l2 norm of the difference where both are finite."""
    delta = t.double() - reference.double()
    return float(delta[delta.isfinite()].square().sum().sqrt())


def biggest(a: torch.Tensor, b: torch.Tensor) -> str:
    """The place of the biggest difference, with both values."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    delta = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=math.inf)
    delta = torch.where((a == b) | ((a != a) & (b != b)), torch.zeros_like(delta), delta)
    place = tuple(int(i) for i in torch.unravel_index(delta.argmax(), delta.shape))
    return f"was {a[place].item()} and is {b[place].item()} at {list(place)}"


def looks(t: torch.Tensor) -> str:
    return f"{t.dtype}{list(t.shape)}"

"""The calls of ``k3 kernels`` on a GPU: against float64 at the released sizes, and how long they take.

    bytes a call must move / time --> GB/s          roofline of the part / time --> the share of it reached

The time is the median of Triton's do_bench, which empties the L2 cache before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..aot.cells import Cell, every_cell
from ..aot.parts import PARTS, Part, roofline_us
from ..kernels.jit_triton import target
from ..kernels.op import OPS
from .exactness import Verdict, judge, outcome
from .rooms import moved_in
from .values import filled

Clock = Callable[[Callable[[], Any]], float]  # milliseconds of a call


def part_here() -> Part | None:
    """The part whose limits this GPU is held against; None where there is none of its architecture."""
    return PARTS.get(target())


def not_for_here(targets: Iterable[str]) -> str | None:
    """Why a kernel for these parts is left out on this GPU, or None. One for all of them is for any other."""
    if target() in targets or set(targets) == set(PARTS):
        return None
    return f"it is for {', '.join(targets)}, and this is {target() or 'no GPU'}"


def targets_of(op: str, provider: str) -> list[str]:
    """The parts an implementation is for: those that its calls are compiled for."""
    of_calls = [c.targets for c in every_cell() if (c.op, c.provider) == (op, provider)]
    return list(dict.fromkeys(t for targets in of_calls for t in targets)) or list(PARTS)


def triton_version() -> str:
    """Of the Triton that compiles here."""
    import triton

    return triton.__version__


def by_do_bench(call: Callable[[], Any]) -> float:
    """Milliseconds, the median over a tenth of a second."""
    import triton.testing

    return triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")


def measure(
    cell: Cell, part: Part | None, device: torch.device | str = "cuda", clock: Clock = by_do_bench
) -> dict[str, Any]:
    """One call: what is wrong with its results, and its time beside the roofline of ``part``; or why it is
    none for this GPU.
    """
    if why := not_for_here(cell.targets):
        return {"cell": cell.name, "skipped": why, "complaints": []}
    op = OPS[cell.op]
    args = filled(cell, device)
    implementation = op.implementations[cell.provider]
    if (why := implementation.objection(*args)) is not None:
        return {"cell": cell.name, "complaints": [f"refused: {why}"]}
    dtype = next(a.dtype for a in args if isinstance(a, torch.Tensor))
    found = Verdict(cell.op, cell.provider, str(dtype).removeprefix("torch."))
    inside = moved_in(args, device)[0]
    judge(found, op, args, dtype, outcome(op, implementation.fn, inside))
    del inside
    ms = clock(lambda: implementation.fn(*args))
    roofline = None if part is None else roofline_us(part, cell.num_bytes, cell.flops, cell.kind)
    return {
        "cell": cell.name,
        "complaints": found.wrong,
        "worst": found.worst,
        "ratio": found.ratio,
        "ms": ms,
        "gb_per_s": cell.num_bytes / ms / 1e6,
        "tflop_per_s": cell.flops / ms / 1e9,
        "roofline_us": roofline,
        "of_roofline": None if roofline is None else roofline / (1e3 * ms),
    }

"""The parts kernels are compiled for: what one has of each thing a kernel can use up, and how fast it is.

Rates are the makers' dense ones and the memory's peak; a roofline from them is a bound, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Part:
    """One GPU. Shared memory in bytes; bandwidth in bytes/s; peaks in FLOP/s by the kind of operand."""

    target: str
    name: str
    backend: str  # cuda or hip
    arch: int | str
    warp: int  # threads
    shared: int  # of a program
    shared_of_core: int
    cores: int  # streaming multiprocessors, or compute units
    warps_of_core: int
    bandwidth: float
    bf16: float
    fp8: float
    fp4: float


PARTS = {
    part.target: part
    for part in (
        Part("sm_90", "H200", "cuda", 90, 32, 232448, 233472, 132, 64, 4.8e12, 0.99e15, 1.98e15, 1.98e15),
        Part("sm_100", "B200", "cuda", 100, 32, 232448, 233472, 148, 64, 7.7e12, 2.25e15, 4.5e15, 9e15),
        Part("sm_103", "B300", "cuda", 103, 32, 232448, 233472, 148, 64, 7.7e12, 2.25e15, 4.5e15, 14e15),
        Part("gfx950", "MI355X", "hip", "gfx950", 64, 163840, 163840, 256, 32, 8e12, 2.5e15, 5e15, 10e15),
    )
}


def parts(targets: str) -> list[Part]:
    """Those named, ``sm_90,gfx950``; all for an empty word. Raises ValueError for an unknown one."""
    names = [word.strip() for word in targets.split(",") if word.strip()] or list(PARTS)
    for name in names:
        if name not in PARTS:
            near = get_close_matches(name, PARTS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"kernels are compiled for {', '.join(PARTS)}, not for {name!r}{hint}")
    return [PARTS[name] for name in names]


def warps_resident(part: Part, registers: int, shared: int, warps: int) -> int:
    """Warps that a core can hold of programs of ``warps`` each, with so many registers a thread."""
    if part.backend == "cuda":
        of_warp = -(-registers * part.warp // 256) * 256  # registers are handed out by 256
        programs = min(65536 // max(1, of_warp * warps), part.warps_of_core // warps, 32)
        shared = shared + 1024  # kept by the driver
    else:
        of_lane = -(-registers // 8) * 8
        programs = min(8, 512 // max(1, of_lane)) * 4 // warps  # four units of 512 registers and 8 waves
    if shared:
        programs = min(programs, part.shared_of_core // shared)
    return programs * warps


def roofline_us(part: Part, num_bytes: int, flops: int, kind: str) -> float:
    """The time no kernel can be under, in microseconds; kind: bf16, fp8 or fp4."""
    return 1e6 * max(num_bytes / part.bandwidth, flops / getattr(part, kind))

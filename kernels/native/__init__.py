"""Kernels in C++ for the CPU, compiled where they run: source and instruction set -> a shared library."""

from .build import ISAS, CannotBuild, best_isa, left_to_meaning, library, unavailable, warn_once
from .call import Call, address, entry, longs, numbers, unwritten, written_down
from .threads import alone, threads

__all__ = [
    "ISAS",
    "Call",
    "CannotBuild",
    "address",
    "alone",
    "best_isa",
    "entry",
    "left_to_meaning",
    "library",
    "longs",
    "numbers",
    "threads",
    "unavailable",
    "unwritten",
    "warn_once",
    "written_down",
]

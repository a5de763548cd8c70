"""Peak resident memory of this process over a piece of work, as Linux counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Filled when the work ends; 0 where the system does not tell."""

    bytes: int = 0


@contextlib.contextmanager
def peak_since() -> Iterator[Peak]:
    """Measure the largest resident size from here to the end of the block."""
    peak = Peak()
    with contextlib.suppress(OSError):  # not writable in some containers: then the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")
    yield peak
    peak.bytes = high_water()


def high_water() -> int:
    """VmHWM of /proc/self/status in bytes, 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else 0

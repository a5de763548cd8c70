"""Which parameters of a long test run in the fast lane:

@pytest.mark.parametrize("seed", thinned(range(22), 6))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], fast: int, several: bool = False) -> list[Any]:
    """All ``values`` as parameters; ``fast`` of them, evenly spread from the first to the last, run in both
    lanes and the others in the slow one. several: each value holds those of several arguments.
    """
    values = list(values)
    kept = {round(i * (len(values) - 1) / max(fast - 1, 1)) for i in range(fast)}
    return [value if i in kept else slow(value, several) for i, value in enumerate(values)]


def slow(value: Any, several: bool = False) -> Any:
    """One parameter of the slow lane."""
    return pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)

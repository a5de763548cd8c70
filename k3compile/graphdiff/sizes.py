"""Sizes of a snapshot's tensors: integers, or expressions over its symbols."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import sympy

from ..passes.expressions import parse

Size = int | sympy.Expr
ITEM = {"bool": 1, "complex64": 8, "complex128": 16}


parsed = lru_cache(maxsize=4096)(parse)


def size(value: int | str) -> Size:
    """One entry of a shape."""
    return parsed(value) if isinstance(value, str) else value


def shape(tensor: Mapping[str, Any]) -> tuple[Size, ...]:
    """The sizes of a tensor."""
    return tuple(size(n) for n in tensor["shape"])


def numel(tensor: Mapping[str, Any]) -> Size:
    """Its number of elements."""
    return prod(shape(tensor), start=1)


def itemsize(dtype: str) -> int:
    """Bytes of an element: ``float32`` is 4, ``float8_e4m3fn`` 1."""
    if dtype in ITEM:
        return ITEM[dtype]
    digits = re.search(r"\d+", dtype)
    assert digits, f"no width in the dtype {dtype}"
    return max(int(digits[0]) // 8, 1)


def bytes_of(tensor: Mapping[str, Any]) -> Size:
    """Its elements' bytes, those of an expanded dimension once."""
    sizes = [n for n, step in zip(shape(tensor), tensor["stride"] or [1] * len(tensor["shape"])) if step != 0]
    return prod(sizes, start=1) * itemsize(tensor["dtype"])


def entry_bytes(tensor: Mapping[str, Any]) -> Size:
    """Bytes of one entry along its first dimension: a slot, a page, an expert, a row."""
    return prod(shape(tensor)[1:], start=1) * itemsize(tensor["dtype"])

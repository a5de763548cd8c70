"""What a user promised about index tensors: that one holds the consecutive rows ``arange(start, end)``.

    i = k3compile.annotate_range(torch.arange(3, 7), 3, 7)      i -> [3, 7), as long as nobody writes i

The table is on the host and is asked at each call, so nothing waits for a device. It knows tensors weakly,
by identity, and a promise ends when the tensor is written, gets another shape or other memory: torch counts
the writes to a tensor's memory, through views too. Writes that torch does not count are the user's to
announce: annotate again after numpy, DLPack, ``.data`` or another process wrote, and after collectives that
receive into the tensor (``recv``, ``scatter``, ``all_to_all_single``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

DTYPES = (torch.int64, torch.int32)
_promises = WeakTensorKeyDictionary()  # tensor -> Promise
_used = False  # whether this process annotates at all: else no body for ranges is worth compiling


class Promise(NamedTuple):
    """Rows [start, end), promised when the tensor at ``address`` had been written ``version`` times."""

    version: int
    start: int
    end: int
    address: int


def annotate_range(index: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Promise that ``index`` holds ``arange(start, end)``, and get it back.

    index: [end - start] int64 or int32. A graph compiled with ``backend="k3"`` that takes it as an input
    then reads and writes rows [start, end) directly. Annotate before the first call of the compiled
    function. The promise is not compared with the values, which would wait for the device: use
    ``options={"range_source": "check"}`` to have each call compare them. It ends when ``index`` is written.

    Raises ValueError for an index that is not a 1-D int64 or int32 tensor, a start below 0, a length that
    is not the index's, and a tensor made in inference mode, whose writes torch does not count.
    """
    if not isinstance(index, torch.Tensor) or index.dim() != 1 or index.dtype not in DTYPES:
        raise ValueError(f"annotate_range wants a 1-D int64 or int32 tensor as index, got {described(index)}")
    for name, given in (("start", start), ("end", end)):
        if not isinstance(given, int) or isinstance(given, bool):
            raise ValueError(f"annotate_range wants {name} as an int, got {given!r}")
    if start < 0 or end - start != index.shape[0]:
        raise ValueError(
            f"annotate_range({start}, {end}) of an index with {index.shape[0]} elements: "
            "start must be at least 0 and end - start the number of elements"
        )
    if index.is_inference():
        raise ValueError(
            "annotate_range cannot tell when a tensor made in inference mode is written; make the index "
            "under `with torch.inference_mode(False):`, or outside"
        )
    global _used
    _used = True
    _promises[index] = Promise(index._version, start, end, address(index))
    return index


def described(index: object) -> str:
    """The index as an error names it."""
    if not isinstance(index, torch.Tensor):
        return f"a {type(index).__name__}"
    return f"a {index.dim()}-D {str(index.dtype).removeprefix('torch.')} tensor"


def range_promised(index: object) -> tuple[int, int] | None:
    """The rows [start, end) ``index`` still holds by promise; None without one, or where it has ended."""
    promise = _promises.get(index) if isinstance(index, torch.Tensor) else None
    if promise is None or (index._version, address(index)) != (promise.version, promise.address):
        return None
    same_shape = index.dim() == 1 and index.shape[0] == promise.end - promise.start
    return (promise.start, promise.end) if same_shape else None


def address(index: torch.Tensor) -> int:
    """Where the elements are, known on the host; 0 for subclasses: some have no memory of their own."""
    return index.data_ptr() if type(index) is torch.Tensor else 0


def was_annotated(index: object) -> bool:
    """Whether ``index`` ever got a promise, kept or ended."""
    return isinstance(index, torch.Tensor) and index in _promises


def in_use() -> bool:
    """Whether anything was annotated in this process."""
    return _used


def forget() -> None:
    """End every promise, as if nothing had been annotated."""
    global _used
    _used = False
    _promises.clear()

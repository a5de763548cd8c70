"""short_conv under speculation as it was before records: the window after every row, in a slot of its own.

    a row with its window   w w w x0 x1 x2
    scratch [r, 0]            '----'
    scratch [r, 1]              '-----'             beside the states of kda_verify_states

The slot a request lives in may be one of its own targets: it is read before any of them is written.
T token rows, C channels, S slots, R requests, J columns of scratch; ``cu`` [R+1] bounds the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .conv import KEPT, conv_samples, convolve, convolve_traceable, owners
from .kda_verify import rows_that_fit
from .kda_verify_states import targets, targets_of
from .op import op


@op(writes=("window",), opaque=True)
def short_conv_verify_states(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor
) -> Tensor:
    """The outputs of short_conv; the window after row i of request r goes to window(a!)[scratch[r, i]].

    scratch [R, J] int64. Columns past a shorter row are not looked at. Raises ValueError, before anything is
    written, when a row is longer than J, a target stands twice or is another request's slot.
    """
    bounds, before = cu.tolist(), window.index_select(0, slots)
    y = convolve(x, weight, before, bounds)
    leave_windows(x, window, before, slots, bounds, scratch)
    return y


def leave_windows(
    x: Tensor, window: Tensor, before: Tensor, slots: Tensor, bounds: list[int], scratch: Tensor
) -> None:
    """The window after every row to its slot of window(a!); before [R, 3, C]: those the rows start from."""
    rows, lengths = rows_that_fit(bounds, scratch.shape[1], "scratch has slots for")
    if not rows:
        return
    place = slots.tolist()
    into = targets_of(scratch, rows, lengths, [place[r] for r in rows])
    strip = torch.cat([before.flatten(0, 1), x[: bounds[-1]].to(window.dtype)])  # windows, then token rows
    taken = [at for r, n in zip(rows, lengths) for at in strip_rows(r, bounds[r], n, len(place))]
    windows = strip.index_select(0, torch.tensor(taken, device=x.device)).view(-1, KEPT, x.shape[1])
    window.index_copy_(0, torch.tensor([s for line in into for s in line], device=x.device), windows)


def strip_rows(r: int, begin: int, count: int, requests: int) -> list[int]:
    """Rows of the windows after each token of request ``r``, in a strip of all windows, then all tokens."""
    old, new = KEPT * r, KEPT * requests + begin
    own = [*range(old, old + KEPT), *range(new, new + count)]
    return [at for i in range(1, count + 1) for at in own[i : i + KEPT]]


@short_conv_verify_states.fake
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@short_conv_verify_states.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in conv_samples(dtype, ([], [1], [4, 0, 2], [2, 1])):
        yield *args, targets(args[3], args[4], len(args[2]))


@short_conv_verify_states.opened
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor) -> Tensor:
    y, before = convolve_traceable(x, weight, window, slots, cu)
    row, place, owned = owners(cu, x.shape[0], slots.shape[0])
    token, kept = torch.arange(x.shape[0], device=x.device), []
    held = torch.cat([before.flatten(0, 1), before.new_zeros(KEPT, x.shape[1])])  # a window more: R may be 0
    for back in reversed(range(KEPT)):
        fresh = x.index_select(0, (token - back).clamp(min=0)).to(window.dtype)
        old = held.index_select(0, row * KEPT + (KEPT + place - back).clamp(max=KEPT - 1))
        kept.append(torch.where((place >= back).unsqueeze(1), fresh, old))
    columns = torch.cat([scratch, scratch.new_zeros(1, scratch.shape[1])])
    slot = torch.where(owned, columns[row, place], 0)  # the null slot takes what belongs to nobody
    window.index_put_((slot,), torch.stack(kept, 1))
    return y

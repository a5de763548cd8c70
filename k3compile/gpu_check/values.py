"""Data for the calls of ``k3 kernels``, which come as shapes without data: by the name of each argument.

    cu [R+1]    rows of equal lengths           slots [R]   1, 2, ..: none is shared
    pages' table [R, P]   each page once        seen [R]    contexts that fill the table, but for the new rows
    ids, idx    spread over all there are       scales      near 1/64, so that sums stay near 1

Floats are normal; log-decays are negative and gates lie in (0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..aot.cells import Cell
from ..kernels.op import OPS
from .exactness import names_of

Named = Mapping[str, Any]


def filled(cell: Cell, device: torch.device | str, seed: int = 0) -> list[Any]:
    """The call's arguments on ``device``, views of wider rows included.

    Raises ValueError for an integer tensor whose name says nothing about what may be in it.
    """
    op, bare = OPS[cell.op], cell.args()
    named = dict(zip(names_of(op), bare))
    generator = torch.Generator(device).manual_seed(seed)
    made: list[Any] = []
    storages: dict[int, Tensor] = {}
    for name, arg in named.items():
        if not isinstance(arg, Tensor):
            made.append(arg)
            continue
        count, key = arg.untyped_storage().nbytes() // arg.element_size(), arg.untyped_storage()._cdata
        if key not in storages:
            storages[key] = random(name, arg, count, generator)
        own = storages[key].as_strided(arg.shape, arg.stride(), arg.storage_offset())
        if not arg.is_floating_point() and arg.dtype != torch.uint8:
            own.copy_(integers(cell, name, arg, named).to(arg.dtype))
        made.append(own)
    return made


def random(name: str, arg: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count] of the argument's dtype; integers are filled later."""
    device = generator.device
    if arg.dtype == torch.uint8:
        low, high = (119, 123) if name.endswith("scale") else (0, 256)
        return torch.randint(low, high, (count,), dtype=torch.uint8, device=device, generator=generator)
    if not arg.is_floating_point():
        return torch.zeros(count, dtype=arg.dtype, device=device)
    if name in ("g", "beta", "rec_g"):
        unit = torch.rand(count, device=device, generator=generator)
        return (unit if name == "beta" else -unit).to(arg.dtype)
    values = torch.randn(count, device=device, generator=generator)
    unit = name in ("q", "k", "kv_b", "gate_w", "up_w", "rec_k") and arg.dim() > 1
    return (values * arg.shape[-1] ** -0.5 if unit else values).to(arg.dtype)


def integers(cell: Cell, name: str, arg: Tensor, named: Named) -> Tensor:
    """What an integer argument may hold, of its shape."""
    if name not in RULES:
        raise ValueError(f"{cell.name}: nothing is known about the integers of {name!r}; add it to values.py")
    return RULES[name](arg, named).expand(arg.shape)


def tokens_of(named: Named) -> int:
    """Token rows: those of the first argument."""
    return next(iter(named.values())).shape[0]


def even_rows(arg: Tensor, named: Named) -> Tensor:
    """cu [R+1] of rows that differ by a token at most."""
    return torch.arange(len(arg)) * tokens_of(named) // (len(arg) - 1)


def contexts(arg: Tensor, named: Named) -> Tensor:
    """Tokens before a row's own: whole pages, as many as leave room for the longest row."""
    (requests, each), size = named["table"].shape, named["pages"].shape[1]
    longest = -(-tokens_of(named) // requests)
    return torch.full((len(arg),), (each * size - longest) // size * size)


def own_pages(arg: Tensor, named: Named) -> Tensor:
    """Each entry its own page, from 1 on; none is the null one."""
    return 1 + torch.arange(arg.numel()).view(arg.shape) % (named["pages"].shape[0] - 1)


def own_slots(arg: Tensor, named: Named) -> Tensor:
    return torch.arange(1, arg.numel() + 1).view(arg.shape)


def slots_after(arg: Tensor, named: Named) -> Tensor:
    """Different ones, past those that :func:`own_slots` gave to the rows."""
    return own_slots(arg, named) + len(arg)


def spread(count: Callable[[Named], int]) -> Callable[[Tensor, Named], Tensor]:
    """Numbers below ``count``, different ones side by side."""

    def rule(arg: Tensor, named: Named) -> Tensor:
        return (torch.arange(arg.numel()) % count(named)).view(arg.shape)

    return rule


def all_recorded(arg: Tensor, named: Named) -> Tensor:
    """As many rows as the records [.., slots, J, H, V] hold."""
    return torch.full((len(arg),), named["rec_u"].shape[-3])


def nothing(arg: Tensor, named: Named) -> Tensor:
    return torch.zeros(arg.shape, dtype=torch.int64)


RULES: dict[str, Callable[[Tensor, Named], Tensor]] = {
    "cu": even_rows,
    "slots": own_slots,
    "scratch": slots_after,
    "table": own_pages,
    "seen": contexts,
    "ids": spread(lambda named: named["w1"].shape[0]),
    "idx": spread(lambda named: named["rows"].shape[0]),
    "accepted": all_recorded,
    "into": own_slots,
    "export_offset": nothing,
    "export_slot": nothing,
}

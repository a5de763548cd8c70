"""When a gather of a proven range may become a view, and a scatter a write of a slice.

    R1  the index is one range of step one along one dimension, in every column; nothing accumulates
    R2  0 <= start <= end <= size is proven: a slice clamps where an index raises
    R3  the result has the same sizes, strides, dtype; what is scattered fits its target, element by element
    R4  no output of the graph sees the view
    R5  what the view looks at is not written before its last reader; nothing else writes what is scattered to
    R6  no consumer writes the memory it reads through the view
    R7  kernels of other devices keep the alignment they assume
    R8  a small view does not keep a large tensor alive

Every refusal names its rule; R4 to R6 are judged in :mod:`aliasing`. The last two are about cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from k3compile.passes.aliasing import Aliases, storage_of
from k3compile.passes.graph import arguments, tensor
from k3compile.passes.index_sites import TABLES, IndexSite
from k3compile.passes.prover import Prover, Size, expr
from k3compile.passes.ranges import Range
from torch import fx

KEPT_ALIVE = 16  # a view of less than this fraction of an intermediate tensor is not worth keeping the rest
ALIGNMENT = 16  # bytes that kernels of other devices may assume of a pointer
RULES = {  # what the reasons of each rule say
    "R1": (
        *("index comes from", "the index ", "dimensions are indexed at once", "has no dimensions"),
        *("step is", "arange of floating", "passes through", "the class changes", "accumulates"),
    ),
    "R2": ("unproven: ",),
    "R3": (
        *("the result would be", "the result would have", "the target is torch."),
        *("broadcast over the rows", "may overlap itself"),
    ),
    "R4": ("reach an output",),
    "R5": ("written before", "written elsewhere", "writes in place"),
    "R6": ("a consumer", "memory of the target"),
    "R7": ("not be aligned",),
    "R8": ("larger alive",),
}


def ruled(reason: str) -> str:
    """A refusal with the rule it rests on: ``the view would reach an output of the graph (R4)``.

    Refusals that rest on none, such as fuel that ran out, stay as they are.
    """
    rule = next((rule for rule, words in RULES.items() if any(word in reason for word in words)), None)
    return f"{reason} ({rule})" if rule else reason


def obligations(site: IndexSite, found: Range) -> list[tuple[str, Size, Size]]:
    """What must hold for a slice to mean what the index means."""
    size = tensor(site.base).shape[site.dim]
    return [
        ("0 <= start", 0, found.start),
        ("0 <= length", 0, found.length),
        ("end <= size", found.end, size),
    ]


def gather_objection(site: IndexSite, found: Range, aliases: Aliases, prover: Prover) -> str | None:
    """Why a view cannot stand where a gather stands."""
    return (
        aliases.view_objection(site.node, site.base)
        or alignment_objection(site, found, aliases, prover)
        or liveness_objection(site, found, aliases, prover)
    )


def scatter_objection(site: IndexSite, found: Range, aliases: Aliases, prover: Prover) -> str | None:
    """Why a write of a slice cannot stand where a scatter stands."""
    target, source = tensor(site.base), tensor(site.source)
    if source.dtype != target.dtype:
        return f"the target is {target.dtype}, the source {source.dtype}"
    wanted = [*target.shape]
    wanted[site.dim] = found.length
    if site.node.target in TABLES and not fits(tensor(arguments(site.node)["index"]), wanted, prover):
        return "the index leaves out columns"
    if not fits(source, wanted, prover):
        return "the source is broadcast over the rows"
    if may_overlap(target, prover):
        return "the target may overlap itself"
    if storage_of(site.source) == storage_of(site.base):
        return "the source is memory of the target"
    if aliases.other_writers(site.base, site.node):
        return "the target is written elsewhere too"
    return None


def fits(t: torch.Tensor, wanted: Sequence[Size], prover: Prover) -> bool:
    """Whether ``t`` has the sizes ``wanted``."""
    return t.dim() == len(wanted) and all(map(prover.equal, t.shape, wanted))


def alignment_objection(site: IndexSite, found: Range, aliases: Aliases, prover: Prover) -> str | None:
    """Kernels of other devices may assume aligned pointers; plain ATen ones do not."""
    base = tensor(site.base)
    users = {user for member in aliases.family(site.node) for user in member.users}
    if base.device.type == "cpu" or all(is_aten(user) for user in users):
        return None
    offset = found.start * base.stride()[site.dim] * base.element_size()
    return None if prover.multiple(offset, ALIGNMENT) else f"the view may not be aligned to {ALIGNMENT} bytes"


def liveness_objection(site: IndexSite, found: Range, aliases: Aliases, prover: Prover) -> str | None:
    """A small view would keep all of an intermediate alive after its other readers are done."""
    if site.base.op != "call_function":
        return None
    last = aliases.last_read(aliases.family(site.node))
    others = [aliases.order[user] for user in site.base.users if user is not site.node]
    kept = last > max(others, default=-1)
    if kept and prover.le(found.length * KEPT_ALIVE, tensor(site.base).shape[site.dim]):
        return f"the view would keep a tensor at least {KEPT_ALIVE} times larger alive"
    return None


def layout(t: torch.Tensor) -> str:
    """Sizes, strides and dtype as text."""
    dims = [f"({', '.join(str(expr(n)) for n in many)})" for many in (t.shape, t.stride())]
    return f"{dims[0]} strides {dims[1]} {t.dtype}"


def layout_objection(old: torch.Tensor, new: torch.Tensor, prover: Prover) -> str | None:
    """Why ``new`` cannot take the place of ``old``."""
    if old.dtype != new.dtype or old.device != new.device:
        return f"the result would be {new.dtype} on {new.device}"
    if not all(map(prover.equal, old.shape, new.shape)):
        return f"the result would have other sizes: {layout(new)}"
    if not all(map(prover.equal, old.stride(), new.stride())):
        return "the result would have other strides"
    return None


def may_overlap(t: torch.Tensor, prover: Prover) -> bool:
    """Whether two elements of ``t`` may be one place in memory, unless its strides prove otherwise."""
    if not all(isinstance(s, int) for s in t.stride()):
        return not t.is_contiguous()
    inner_first = sorted(zip(t.stride(), t.shape), key=lambda pair: pair[0])
    span: Size = 1
    for stride, size in inner_first:
        if not prover.le(span, stride) and not prover.equal(size, 1):
            return True
        span = stride * size
    return False


def is_aten(node: fx.Node) -> bool:
    """Whether a call is ATen's own and not a custom op's or a functionalised one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")

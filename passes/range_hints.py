"""Says in the user's own names what would let a site be rewritten."""

from __future__ import annotations

import ast

import torch
from k3compile.passes.graph import value
from k3compile.passes.index_sites import IndexSite
from k3compile.passes.prover import Size, expr
from k3compile.passes.ranges import Range
from k3compile.passes.source import positional, spelled
from torch import fx

INDEX_CALLS = {"index_select", "index_copy", "index_copy_"}
BUILD_IT = (
    "annotate it with k3compile.annotate_range(index, start, end) before the first call, or build it in the "
    "graph with torch.arange(start, end) from sizes kept in a CPU int64 tensor"
)
WIDEN_IT = "keep the index in int64, or add torch._check(end <= 2**31)"


def bound_hint(site: IndexSite, found: Range, obligation: str) -> str:
    """``add torch._check(nd <= x.shape[0])`` for the obligation that was not proven."""
    start, end = spelled_range(site.index, found)
    size = spelled_size(site)
    facts = {
        "0 <= start": f"{start} >= 0",
        "0 <= length": f"{start} <= {end}",
        "end <= size": f"{end} <= {size}",
    }
    return f"add torch._check({facts[obligation]})"


def origin_hint(reason: str) -> str | None:
    """What to do about an index without a proven range, where there is something to do."""
    if reason.startswith("the class changes more than once"):
        return "order the batch so that the rows of one class are contiguous"
    if reason.startswith("passes through torch.int32"):
        return WIDEN_IT
    return BUILD_IT if reason == "index comes from a graph input" else None


def spelled_size(site: IndexSite) -> str:
    """``x.shape[0]`` as the user would write it, or the symbol."""
    call = spelled(site.node, INDEX_CALLS)
    base = positional(call, 0, receiver=True) if call else None
    size = value(site.base).shape[site.dim]
    return f"{base}.shape[{site.dim}]" if base else str(expr(size))


def spelled_range(index: fx.Node, found: Range) -> tuple[str, str]:
    """Start and end as written in the call of arange, or as symbols."""
    while (
        index.args and isinstance(index.args[0], fx.Node) and isinstance(value(index.args[0]), torch.Tensor)
    ):
        index = index.args[0]
    call = spelled(index, {"arange"})
    texts = [positional(call, place, receiver=False) for place in (0, 1)] if call else [None, None]
    if texts[0] is not None and same_range(index, found):
        return (texts[0], texts[1]) if texts[1] is not None else ("0", texts[0])
    return symbol(found.start), symbol(found.end)


def same_range(arange: fx.Node, found: Range) -> bool:
    """Whether the index is the whole arange, so that its arguments speak of the index too."""
    return expr(value(arange).shape[0]) == expr(found.length)


def symbol(size: Size) -> str:
    return ast.unparse(ast.parse(str(expr(size)), mode="eval"))

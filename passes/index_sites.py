"""Finds the places of a graph that read or write rows by an index tensor, in every spelling ATen has for it.

    gather     index_select(x, d, i)     index.Tensor(x, [None, i])     gather(x, d, i in every column)
    scatter    index_copy(x, d, i, y)    index_put(x, [None, i], y)     scatter(x, d, i in every column, y)

A gather or scatter by a table that differs between columns, embedding and index_add are no sites: their index
is data by nature. A fancy index that is data is one, and its remark says where the index comes from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from k3compile.passes.graph import arguments, tensor, value
from k3compile.passes.row_tables import run_behind, same
from torch import fx

aten = torch.ops.aten
NAMED = {aten.index_select.default, aten.index_copy.default}
TABLES = {aten.gather.default, aten.scatter.src}
FANCY = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default}
IN_PLACE = {aten.index_copy_.default, aten.index_put_.default, aten.scatter_.src}
MASKS = (torch.bool, torch.uint8)


class IndexSite(NamedTuple):
    """One gather (source is None) or scatter along ``dim`` of ``base``; problem is why it is no candidate."""

    node: fx.Node
    base: fx.Node
    dim: int
    index: fx.Node | None
    source: fx.Node | None
    problem: str | None

    @property
    def is_gather(self) -> bool:
        """Whether rows are read, not written."""
        return self.source is None


def site_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The node of every site, in graph order; each must end in one remark."""
    known = NAMED | FANCY | IN_PLACE
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [n for n in calls if n.target in known or (n.target in TABLES and rows_of_table(n) is not None)]


def site_of(node: fx.Node) -> IndexSite:
    """The site at ``node`` as its arguments are now."""
    return named_site(node) if "dim" in arguments(node) else fancy_site(node)


def named_site(node: fx.Node) -> IndexSite:
    named = arguments(node)
    base, source = named["self"], named.get("source", named.get("src"))
    rank = tensor(base).dim()
    index = rows_of_table(node) if node.target in TABLES else named["index"]
    problem = in_place(node) or ("the tensor has no dimensions" if rank == 0 else None)
    return IndexSite(node, base, named["dim"] % max(rank, 1), index, source, problem)


def rows_of_table(node: fx.Node) -> fx.Node | None:
    """The 1-D index that the table of a gather or scatter shows in every column, along its dimension."""
    named = arguments(node)
    table, dims = named["index"], tensor(named["index"]).dim()
    if dims == 0:
        return None
    dim = named["dim"] % dims
    if table.target is aten.remainder.Scalar and same(value(table.args[1]), tensor(named["self"]).shape[dim]):
        table = table.args[0]  # take_along_dim's wrap around, which rows inside the tensor never meet
    return run_behind(table, dim)


def fancy_site(node: fx.Node) -> IndexSite:
    named = arguments(node)
    indices = [(dim, one) for dim, one in enumerate(named["indices"]) if one is not None]
    problem = in_place(node) or index_problem([one for _, one in indices])
    if problem is None and named.get("accumulate"):
        problem = "it accumulates"
    dim, index = indices[0] if indices else (0, None)
    return IndexSite(node, named["self"], dim, index, named.get("values"), problem)


def in_place(node: fx.Node) -> str | None:
    return "it writes in place: the graph is not functional" if node.target in IN_PLACE else None


def index_problem(indices: list[fx.Node]) -> str | None:
    if len(indices) != 1:
        return f"{len(indices)} dimensions are indexed at once"
    found = tensor(indices[0])
    if found is None or found.dtype in MASKS:
        return "the index is a mask"
    return f"the index has {found.dim()} dimensions" if found.dim() != 1 else None

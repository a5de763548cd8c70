"""Read and write contiguous rows as views, where the model gathered and scattered them by an index tensor.

    i = arange(0, nv); j = arange(nv, T)
    a = f(index_select(x, 0, i))              a = f(x[0:nv])
    b = op(index_select(x, 0, j))       ->    out = slice_scatter(out, a, 0, 0, nv)
    out = index_copy(out, 0, i, a)            op_into(x[nv:T], out, start=nv)
    out = index_copy(out, 0, j, b)            no gather, no scatter, no tensor for b

A site is rewritten when its index is proven to be ``arange(s, e)`` (:mod:`ranges`) and :mod:`legality` has
no objection. A scatter becomes a write of the op's own results (:mod:`destination`) or a ``slice_scatter``.
"""

from __future__ import annotations

import torch
from k3compile.passes.aliasing import Aliases
from k3compile.passes.destination import destination, write_through
from k3compile.passes.graph import emit, op_name, tensor
from k3compile.passes.index_sites import IndexSite, site_nodes, site_of
from k3compile.passes.legality import (
    gather_objection,
    layout,
    layout_objection,
    obligations,
    ruled,
    scatter_objection,
)
from k3compile.passes.multi_version import RANGES, promised_starts
from k3compile.passes.prover import expr
from k3compile.passes.range_hints import bound_hint, origin_hint
from k3compile.passes.ranges import Range, range_of
from k3compile.passes.remarks import PassResult, Proof, Remark
from k3compile.passes.runner import Context
from k3compile.passes.sizes import Sizes
from k3compile.passes.source import location
from torch import fx

aten = torch.ops.aten
NAME = "contiguous_views"
STOPPED = "stopped by fuel or by the bisector"


class ContiguousViews:
    """The pass. Its remarks: one per index site of the graph, applied with proofs or missed with the why."""

    name, level, keeps = NAME, "aten", "exact"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Rewrite every provable site of ``gm``; gathers first, since scatters look at what feeds them."""
        work = Work(gm.graph, ctx)
        nodes = site_nodes(gm.graph)
        order = {node.name: place for place, node in enumerate(nodes)}
        gathers_first = sorted(nodes, key=lambda node: not site_of(node).is_gather)
        remarks = tuple(work.attempt(site_of(node)) for node in gathers_first)
        remarks = tuple(sorted(remarks, key=lambda remark: order[remark.node]))
        return PassResult(any(r.kind == "applied" for r in remarks), remarks)


CONTIGUOUS_VIEWS = ContiguousViews()


class Work:
    """One run over one graph: what is known, kept up to date while sites are rewritten."""

    def __init__(self, graph: fx.Graph, ctx: Context):
        self.graph, self.ctx, self.prover = graph, ctx, ctx.prover
        self.aliases, self.sizes = Aliases(graph), Sizes(graph)
        self.promised = promised_starts(graph) if ctx.body == RANGES else set()

    def attempt(self, site: IndexSite) -> Remark:
        """Rewrite ``site`` or say why not."""
        found = site.problem or range_of(site.index, self.prover)
        if isinstance(found, str):
            return missed(site, found, fix_it=origin_hint(found))
        how = "annotation" if self.promised & expr(found.start).free_symbols else "construction"
        proofs = [Proof("index is a range", how, f"{' of '.join(reversed(found.built_by))} = {found}")]
        for obligation, left, right in obligations(site, found):
            proof = self.prover.prove_le(obligation, left, right)
            if proof is None:
                hint = bound_hint(site, found, obligation)
                detail = f"{expr(left)} <= {expr(right)} is not known"
                return missed(site, f"unproven: {obligation}", detail, hint)
            proofs.append(proof)
        size = tensor(site.base).shape[site.dim]
        for left, right in (
            (0, found.start),
            (found.start, found.end),
            (found.end, size),
            (found.start, size),
        ):
            self.prover.teach(left, right)
        rewrite = self.gather if site.is_gather else self.scatter
        return rewrite(site, found, proofs)

    def gather(self, site: IndexSite, found: Range, proofs: list[Proof]) -> Remark:
        """Replace a gather by a view, where nobody can tell."""
        objection = gather_objection(site, found, self.aliases, self.prover)
        if objection:
            return missed(site, objection)
        proofs.append(Proof("nobody can tell the view from the copy", "construction", "no output, no write"))
        return self.emit(site, found, aten.slice.Tensor, (site.base, site.dim), proofs, "view", -1)

    def scatter(self, site: IndexSite, found: Range, proofs: list[Proof]) -> Remark:
        """Let the op write the rows itself, or replace the scatter by a slice_scatter."""
        objection = scatter_objection(site, found, self.aliases, self.prover)
        if objection:
            return missed(site, objection)
        route = destination(site, self.aliases, self.prover)
        start = None if isinstance(route, str) else self.sizes.at(found.start, route.place)
        if start is None:
            why = route if isinstance(route, str) else "no node computes the first row"
            args = (site.base, site.source, site.dim)
            return self.emit(
                site, found, aten.slice_scatter.default, args, proofs, f"slice_scatter ({why})", 0
            )
        if not self.ctx.may_rewrite(NAME):
            return missed(site, STOPPED)
        new = write_through(site, route, start)
        self.aliases.replaced(route.call, new, route.place)
        detail = f"{op_name(new)} writes rows {found} of the buffer itself"
        return applied(site, found, proofs, detail, -1)

    def emit(self, site, found, target, args, proofs, detail, launches) -> Remark:
        """Put ``target(*args, start, end)`` in the place of the site, if its layout turns out the same."""
        start, end = self.sizes.at(found.start, site.node), self.sizes.at(found.end, site.node)
        if start is None or end is None:
            return missed(site, f"no node computes the bounds of {found}")
        with self.graph.inserting_before(site.node):
            new = emit(self.graph, target, (*args, start, end), like=site.node, mode=self.ctx.fake_mode)
        objection = layout_objection(tensor(site.node), tensor(new), self.prover)
        if objection or not self.ctx.may_rewrite(NAME):
            self.graph.erase_node(new)
            return missed(site, objection or STOPPED)
        proofs.append(Proof("same sizes, strides and dtype", "construction", layout(tensor(new))))
        site.node.replace_all_uses_with(new)
        self.aliases.replaced(site.node, new, site.node)
        remark = applied(site, found, proofs, detail, launches)
        self.graph.erase_node(site.node)
        return remark


def missed(site: IndexSite, reason: str, detail: str = "", fix_it: str | None = None) -> Remark:
    source = location(site.node)
    where = str(source) if source else None
    return Remark(
        NAME, "missed", site.node.name, op_name(site.node), ruled(reason), detail, where, (), fix_it
    )


def applied(site: IndexSite, found: Range, proofs: list[Proof], detail: str, launches: int) -> Remark:
    """launches -1: a gather or scatter kernel, its allocation and its reading and writing are gone."""
    source, moved = location(site.node), tensor(site.source or site.node)
    bytes_ = expr(moved.numel() * moved.element_size() * 2 * launches)
    expected = {"launches": launches, "bytes": str(bytes_), "allocations": launches}
    where = str(source) if source else None
    reason = f"rows {found} of dimension {site.dim}"
    name, op = site.node.name, op_name(site.node)
    return Remark(NAME, "applied", name, op, reason, detail, where, tuple(proofs), None, expected)

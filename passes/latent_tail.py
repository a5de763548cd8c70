"""Make one op of the end of a latent mixture of experts.

    y = finalize(rows, w, idx)            in any spelling: finalize.py
    y = wait(all_reduce(y))
    u = rms_norm(y, norm_w) @ up_w.t()    ->    out = k3.latent_tail(rows, w, idx, norm_w, up_w, shared, ...)
    s = wait(all_reduce(shared))
    out = u + s

A site is a finalize. It is rewritten when all that follows is there in this order and nobody reads anything
in between (latent_tail_parts.py); a group of one rank becomes ``group = ""``, so that nothing is sent.
"""

from __future__ import annotations

import torch
from k3compile.kernels import acc
from k3compile.passes.finalize import NotFinalize, finalize_at
from k3compile.passes.finalize_axes import is_layout
from k3compile.passes.graph import emit, op_name, positions, schema_writes, storage_id, tensor
from k3compile.passes.latent_tail_parts import Stopped, Tail, grow, short
from k3compile.passes.prover import expr
from k3compile.passes.remarks import PassResult, Proof, Remark
from k3compile.passes.runner import Context
from k3compile.passes.sizes import Sizes
from k3compile.passes.source import location
from k3compile.passes.static_check import alike
from torch import fx

aten, k3 = torch.ops.aten, torch.ops.k3
NAME = "latent_tail"


class LatentTail:
    """The pass. Its remarks: one per finalize of the graph, applied, or missed with how far it came."""

    name, level, keeps = NAME, "aten", "numeric"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Rewrite every finalize of ``gm`` that grows into a latent tail."""
        remarks, gone = [], set()
        for node in [n for n in gm.graph.nodes if n.op == "call_function"]:
            if node in gone or (found := finalize_at(node, ctx.prover)) is None:
                continue
            if isinstance(found, NotFinalize):
                remarks.append(missed(node, found.node, found.reason, "", found.fix_it))
                continue
            tail = Tail(found, found.result, list(found.nodes))
            remark = attempt(node, tail, ctx)
            if remark is not None:
                remarks.append(remark)
                gone |= set(tail.nodes) if remark.kind == "applied" else set()
        return PassResult(any(r.kind == "applied" for r in remarks), tuple(remarks))


LATENT_TAIL = LatentTail()


def attempt(site: fx.Node, tail: Tail, ctx: Context) -> Remark | None:
    """Rewrite one site or say why not; None for a weighted sum that only looks like a finalize."""
    found = tail.finalize
    try:
        grow(tail, ctx.prover)
        check_dtypes(tail)
        check_writes(tail)
        new = replacement(tail, ctx)
    except Stopped as stopped:
        if found.index is None and tail.parts[-1] in ("finalize", "sum over ranks"):
            return None
        detail = f"closest: {', '.join(tail.parts)}; written as {found.spelling}"
        return missed(site, stopped.node, stopped.reason, detail, stopped.fix_it)
    return applied(site, tail, *new)


def check_dtypes(tail: Tail) -> None:
    """No value is rounded to less than the model's dtype on the way: the op would not round there."""
    model = tensor(tail.finalize.rows).dtype
    for node in tail.nodes:
        if tensor(node) is not None and tensor(node).dtype not in (model, acc(model)):
            raise Stopped(
                node, f"{node.name} is {short(tensor(node).dtype)}, the experts' rows are {short(model)}"
            )
    for name, node in (("shared expert's part", tail.shared), ("result", tail.end)):
        if tensor(node).dtype != model:
            raise Stopped(
                node, f"the {name} is {short(tensor(node).dtype)}, the experts' rows are {short(model)}"
            )


def check_writes(tail: Tail) -> None:
    """Nothing that the op reads is written between where it was read and where the op will stand."""
    place, found = positions(tail.end.graph), tail.finalize
    first, last = min(place[n] for n in tail.nodes), place[tail.end]
    reads = (found.rows, found.weights, found.index, found.zeroing, tail.norm.weight, tail.up, tail.shared)
    memory = {storage_id(tensor(node)) for node in reads if node is not None}
    for node in tail.end.graph.nodes:
        if first < place[node] < last and any(storage_id(tensor(w)) in memory for w in schema_writes(node)):
            raise Stopped(node, f"{op_name(node)} {node.name} writes to what the tail reads")


def replacement(tail: Tail, ctx: Context) -> tuple[fx.Node, list[fx.Node]]:
    """Put the op in the place of the last node, and erase what it replaces: the op, and all that is new.

    Raises Stopped, the graph as it was.
    """
    graph, end = tail.end.graph, tail.end
    before = set(graph.nodes)
    try:
        with graph.inserting_before(end):
            new = Builder(tail, ctx).op()
        if not alike(tensor(end), tensor(new), ctx.prover):
            raise Stopped(end, "the op's result has another layout")
        if not ctx.may_rewrite(NAME):
            raise Stopped(end, "stopped by fuel or by the bisector")
    except Stopped:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise
    made = [node for node in graph.nodes if node not in before]
    end.replace_all_uses_with(new)
    place = positions(graph)
    for node in sorted(tail.nodes, key=place.__getitem__, reverse=True):
        graph.erase_node(node)
    return new, made


class Builder:
    """Makes the op's arguments out of what stands in the graph, at the graph's insertion point."""

    def __init__(self, tail: Tail, ctx: Context):
        self.tail, self.ctx = tail, ctx
        self.sizes = Sizes(tail.end.graph)

    def op(self) -> fx.Node:
        """The call of ``k3.latent_tail``."""
        tail, found = self.tail, self.tail.finalize
        weights = self.by_choice(found.weights)
        if found.zeroing is not None:
            weights = self.emit(aten.mul.Tensor, weights, self.by_choice(found.zeroing))
        rows = found.rows
        if tensor(rows).dim() != 2:
            rows = self.emit(aten.view.default, rows, [-1, self.size(tensor(rows).shape[-1])])
        up = self.emit(aten.permute.default, tail.up, [1, 0]) if tail.up_is_transposed else tail.up
        norm = tail.norm
        args = (rows, weights, self.index(), norm.weight, up, tail.shared, norm.eps, tail.group)
        return self.emit(k3.latent_tail.default, *args)

    def index(self) -> fx.Node:
        """idx [T, k]: a negative number is a hole, and stands only where the graph dropped it."""
        found = self.tail.finalize
        if found.index is None:  # row (t j) is token t's j-th
            count = self.size(self.tokens() * found.top_k)
            device = {"dtype": torch.int32, "device": tensor(found.rows).device}
            made = self.emit(aten.arange.default, count, **device)
            return self.emit(aten.view.default, made, [-1, self.size(found.top_k)])
        index = self.by_choice(found.index)
        if not found.wraps:
            return index
        from_end = self.emit(aten.add.Tensor, index, self.size(tensor(found.rows).shape[0]))
        negative = self.emit(aten.lt.Scalar, index, 0)
        return self.emit(aten.where.self, negative, from_end, index)

    def tokens(self) -> torch.SymInt | int:
        return tensor(self.tail.finalize.result).shape[0]

    def by_choice(self, node: fx.Node) -> fx.Node:
        """``node`` as [T, k]; its elements are in this order already."""
        if tensor(node).dim() == 2 and self.ctx.prover.equal(tensor(node).shape[1], self.tail.finalize.top_k):
            return node
        return self.emit(aten.view.default, node, [-1, self.size(self.tail.finalize.top_k)])

    def size(self, size: torch.SymInt | int) -> fx.Node | int:
        """A size as an argument. Raises Stopped where no node holds it."""
        found = self.sizes.at(size, self.tail.end)
        if found is None:
            raise Stopped(self.tail.end, f"no node computes the size {expr(size)}")
        return found

    def emit(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        """A new node. Raises Stopped where a view would have to copy."""
        end = self.tail.end
        try:
            return emit(end.graph, target, args, kwargs, like=end, mode=self.ctx.fake_mode)
        except (RuntimeError, ValueError) as error:
            raise Stopped(end, f"an argument of the op needs a copy: {str(error).splitlines()[0]}") from error


def missed(site: fx.Node, at: fx.Node, reason: str, detail: str, fix_it: str | None) -> Remark:
    source = location(at) or location(site)
    where = str(source) if source else None
    return Remark(NAME, "missed", site.name, op_name(site), reason, detail, where, (), fix_it)


def applied(site: fx.Node, tail: Tail, new: fx.Node, made: list[fx.Node]) -> Remark:
    """What the op replaces: each intermediate tensor was allocated, written and read again.

    Not counted: what made the index safe to read with, which may go as well.
    """
    source, found, norm = location(new), tail.finalize, tail.norm
    computed = [n for n in tail.nodes if not is_view(n)]
    fresh = sum(not is_view(n) for n in made)
    between = [tensor(n) for n in computed if n is not tail.end]
    bytes_ = sum((t.numel() * t.element_size() for t in between if t is not None), 0) * -2
    sums = sum(n.target is torch.ops._c10d_functional.all_reduce.default for n in tail.nodes)
    expected = {"launches": fresh - len(computed) + sums, "bytes": str(expr(bytes_))}
    expected |= {"allocations": fresh - len(computed)} | ({"all_reduces": -tail.lone} if tail.lone else {})
    ranks = "one rank" if tail.lone else f"group {tail.group}" if tail.group else "no ranks"
    holes = "holes dropped" if found.drops else "no holes"
    detail = f"written as {found.spelling}, {holes}, summed over {ranks}, norm rounded {norm.rounding}"
    proofs = (
        Proof("nobody else reads what lies between", "construction", f"{len(tail.nodes)} nodes"),
        Proof("idx[t, j] chooses the row of w[t, j]", "construction", "followed through all views"),
    )
    where = str(source) if source else None
    reason = f"finalize and tail of {len(computed)} operations are one"
    return Remark(NAME, "applied", site.name, op_name(site), reason, detail, where, proofs, None, expected)


def is_view(node: fx.Node) -> bool:
    """Whether a node only shows its input."""
    wait = node.target is torch.ops._c10d_functional.wait_tensor.default
    return wait or (is_layout(node) and node.target is not aten.clone.default)

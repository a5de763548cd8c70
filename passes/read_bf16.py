"""Let a product read its bfloat16 matrix as it is, where torch would first make a float32 copy of it.

    f = to(w, float32)           w bfloat16 [out, in]
    y = mm(x, f.t())        ->   y = k3.linear_bf16(x, w)         x float32 [T, in], on a CPU
    k3.mla_attend(q, f, ..) ->   k3.mla_attend(q, w, ..)          an op that widens what it is given

Widening is exact, so the same numbers are multiplied; only the order of the sums may differ. A copy that
somebody else reads too stays for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from k3compile.passes.finalize_axes import REORDER, is_cast, reordered
from k3compile.passes.graph import emit, fake_mode_of, op_name, tensor, value
from k3compile.passes.prover import expr
from k3compile.passes.remarks import PassResult, Proof, Remark
from k3compile.passes.runner import Context
from k3compile.passes.source import location
from k3compile.passes.static_check import alike
from torch import fx

aten = torch.ops.aten
NAME = "read_bf16"
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # where x stands; the matrix follows it
WIDENS = ("mla_attend", "mla_attend_block")  # of our ops those that take a bfloat16 matrix, at the same place
WIDENED = Proof("the matrix is widened, never rounded", "static", "bfloat16 -> float32")


@dataclass(frozen=True)
class Found:
    """A product with a widened matrix. trail: from what the product reads back to what follows ``matrix``."""

    product: fx.Node
    x: fx.Node
    matrix: fx.Node
    trail: tuple[fx.Node, ...]

    @property
    def widens(self) -> bool:
        """Whether what multiplies is an op that takes the matrix as it is kept."""
        return self.product.target not in PRODUCTS

    @property
    def transposed(self) -> bool:
        """Whether the product reads rows of the matrix as its columns."""
        return sum(n.target in REORDER and reordered(n) == [1, 0] for n in self.trail) % 2 == 1


@dataclass(frozen=True)
class ReadBf16:
    """The pass. On GPUs activations are bfloat16 too, and no copy is made."""

    name: ClassVar[str] = NAME
    level: ClassVar[str] = "aten"
    keeps: ClassVar[str] = "numeric"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Rewrite every product of ``gm`` with a widened matrix that it can."""
        remarks = tuple(  # one by one: what a product reads may be a product that has just been replaced
            attempt(found, ctx) for node in list(gm.graph.nodes) if (found := product_at(node)) is not None
        )
        return PassResult(any(r.kind == "applied" for r in remarks), remarks)


def product_at(node: fx.Node) -> Found | None:
    """What ``node`` multiplies, if it is a product with a matrix that was widened from bfloat16."""
    widening = [getattr(torch.ops.k3, name).default for name in WIDENS]
    places = PRODUCTS | dict.fromkeys(widening, 0)
    if node.op != "call_function" or node.target not in places:
        return None
    at = places[node.target]
    x, matrix = node.args[at : at + 2]
    trail = []
    while is_cast(matrix) or matrix.target in REORDER:
        trail.append(matrix)
        matrix = matrix.args[0]
    if any(is_cast(n) for n in trail) and tensor(matrix).dtype == torch.bfloat16:
        return Found(node, x, matrix, tuple(trail))
    return None


def objection(found: Found) -> str | None:
    """Why the product has to stay, or None."""
    x, matrix = tensor(found.x), tensor(found.matrix)
    if x.device.type != "cpu":
        return f"{x.device.type} tensors: the op is for CPUs"
    if x.dtype != torch.float32:
        return f"the product runs in {x.dtype}, not float32"
    if found.product.target is aten.addmm.default:
        return "a bias is added"
    if len([n for n in found.trail if is_cast(n)]) > 1:
        return "the matrix is cast more than once"
    if found.widens:
        return None if len(found.trail) == 1 else "the matrix is not only widened"
    if not found.transposed or matrix.stride(1) != 1:
        return "the outputs are not the rows of the matrix as it is kept"
    return None


def attempt(found: Found, ctx: Context) -> Remark:
    """Rewrite one product, or say why not."""
    why, node = objection(found), found.product
    if why is None:
        graph = node.graph
        with graph.inserting_before(node):
            mode, op, args = ctx.fake_mode or fake_mode_of(graph), torch.ops.k3.linear_bf16.default, ()
            if found.widens:
                op, args = node.target, node.args[2:]
            new = emit(graph, op, (found.x, found.matrix, *args), like=node, mode=mode)
        if not alike(value(node), value(new), ctx.prover):
            why = "the op's result looks different"
        elif not ctx.may_rewrite(NAME):
            why = "stopped by fuel or by the bisector"
        if why is not None:
            graph.erase_node(new)
    if why is not None:
        return remark(found, "missed", why)
    made = remark(found, "applied", "the matrix is read as it is", (WIDENED,), saved(found))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return made


def saved(found: Found) -> dict[str, int | str]:
    """What the rewrite saves before fusion: half of what is read; the copy, if nobody else reads it."""
    numbers = tensor(found.matrix).numel()
    lone = all(len(node.users) == 1 for node in found.trail)
    bytes_ = -(2 + (2 + 4) * lone) * numbers
    return {"launches": -lone, "bytes": str(expr(bytes_)), "allocations": -lone}


def remark(
    found: Found,
    kind: str,
    reason: str,
    proofs: tuple[Proof, ...] = (),
    expected: dict[str, int | str] | None = None,
) -> Remark:
    node, source = found.product, location(found.product)
    where = str(source) if source else None
    detail = f"matrix {found.matrix.name}"
    return Remark(
        NAME, kind, node.name, op_name(node), reason, detail, where, proofs, expected=expected or {}
    )


READ_BF16 = ReadBf16()

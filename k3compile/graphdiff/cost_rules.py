"""What one operation reads, writes and computes, by its name: an estimate from sizes, before any fusion.

    views, sizes, asserts            nothing
    gather, embedding                the rows read, not the table
    scatter of rows                  the rows written, if the target may be reused (cost.py decides that)
    a product                        2 M N K floating point operations
    a k3 op with pools               the slots it touches, not the pool
    anything else                    its tensors once, one operation an element

Data decides some sizes: pages in use, experts chosen. Those are upper bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import sympy

from .sizes import Size, bytes_of, entry_bytes, itemsize, numel, shape, size

FREE = {
    "operator.getitem", "aten._assert_scalar.default", "aten._assert_async.msg",
    "aten._local_scalar_dense.default",
    "aten.sym_size.int", "aten.sym_numel.default", "aten.sym_stride.int", "aten.sym_storage_offset.default",
    "aten.view.default", "aten._unsafe_view.default", "aten.alias.default", "aten.detach.default",
    "aten.slice.Tensor", "aten.select.int", "aten.unbind.int", "aten.t.default", "aten.transpose.int",
    "aten.permute.default", "aten.expand.default", "aten.unsqueeze.default", "aten.squeeze.dim",
    "aten.squeeze.default", "aten.as_strided.default", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.diagonal.default", "aten.unfold.default", "aten.view_as_real.default",
    "aten.lift_fresh_copy.default",
    "_c10d_functional.wait_tensor.default", "k3.context_place.default", "k3.exchanged_rows.default",
}  # fmt: skip
EMPTY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
ROWS_READ = (
    "aten.index_select",
    "aten.index.",
    "aten._unsafe_index.",
    "aten.embedding",
    "aten.gather",
    "aten.take",
)
COLLECTIVES = "_c10d_functional."


class Call(NamedTuple):
    """One node: its op's name, its arguments as snapshot values (tensors) or plain ones, and its results.

    sends: what the snapshot says it sends to other ranks.
    """

    target: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    results: tuple[Mapping[str, Any], ...]
    sends: tuple[Mapping[str, Any], ...] = ()

    @property
    def tensors(self) -> list[Mapping[str, Any]]:
        """Every tensor among the arguments."""
        found: list[Mapping[str, Any]] = []
        todo: list[Any] = [*self.args, *self.named.values()]
        while todo:
            one = todo.pop(0)
            if isinstance(one, Mapping) and "shape" in one:
                found.append(one)
            elif isinstance(one, (list, tuple)):
                todo = [*one, *todo]
        return found

    def get(self, place: int, name: str) -> Any:
        """An argument by name, or by its place where the graph gives it by place."""
        return (
            self.named[name] if name in self.named else self.args[place] if place < len(self.args) else None
        )


class Work(NamedTuple):
    """What a call does. Bytes and operations are sympy expressions or integers; results are not counted."""

    read: Size = 0
    written: Size | None = None  # None: all of the results
    flops: Size = 0
    launches: int = 1
    collectives: Size = 0
    collective_bytes: Size = 0


def work_of(call: Call) -> Work:
    """The work of one call that is not free."""
    name = call.target.removesuffix(".default")
    if name.startswith("k3."):  # an implementation costs what its op costs
        name = ".".join(name.split(".")[:2])
    if (rule := RULES.get(name)) is not None:
        return rule(call)
    if name.startswith(COLLECTIVES):
        moved = sum((bytes_of(t) for t in call.tensors), 0)
        return Work(read=moved, collectives=1, collective_bytes=moved)
    if any(call.target.startswith(prefix) for prefix in ROWS_READ):
        rows = sum((bytes_of(t) for t in call.results), 0)
        return Work(read=rows + sum((bytes_of(t) for t in call.tensors[1:]), 0))
    if call.target.startswith(EMPTY):
        return Work(written=0, launches=0)
    return elementwise(call)


def elementwise(call: Call) -> Work:
    """Every tensor read once, one operation for each element of the largest one."""
    read = sum((bytes_of(t) for t in call.tensors), 0)
    sizes = [numel(t) for t in (*call.results, *call.tensors[:1])]
    return Work(read=read, flops=largest(sizes))


def largest(sizes: list[Size]) -> Size:
    """The largest of some sizes; of symbolic ones, that which is the largest where every symbol is large."""

    def weight(s: Size) -> int:
        return s if isinstance(s, int) else int(s.subs(dict.fromkeys(s.free_symbols, 1009)))

    return max(sizes, key=weight, default=0)


def product(left: int, right: int) -> Callable[[Call], Work]:
    """A matrix product of the tensors at two places: 2 x rows x columns x inner."""

    def rule(call: Call) -> Work:
        a, result = call.args[left], call.results[0]
        inner = shape(a)[-1]
        return Work(read=sum((bytes_of(t) for t in call.tensors), 0), flops=2 * numel(result) * inner)

    return rule


def attention(call: Call) -> Work:
    """Scaled dot product attention over q [.., Tq, d], k [.., Tk, d], v [.., Tk, e], unmasked."""
    q, k, v = call.args[:3]
    rows = prod(shape(q)[:-1], start=1)
    flops = 2 * rows * shape(k)[-2] * (shape(q)[-1] + shape(v)[-1])
    return Work(read=sum((bytes_of(t) for t in call.tensors), 0), flops=flops)


def delta_rule(call: Call) -> Work:
    """A KDA op: its inputs once, the states of its slots read; 7 V K H a token. A prefill writes the states,
    a verify three records a token, or without records a state a token.
    """
    inputs = [call.get(place, name) for place, name in enumerate(("q", "k", "v", "g", "beta"))]
    q, k, v, g, _ = inputs
    tokens, heads, keys = shape(q)
    states = slot_bytes(call.get(5, "state"), call.get(6, "slots"))
    if "states" in call.target:
        written = entry_bytes(call.get(5, "state")) * tokens
    else:
        written = sum((bytes_of(t) for t in (v, k, g)), 0) if "verify" in call.target else states
    read = sum((bytes_of(t) for t in inputs), 0) + states
    return Work(read, bytes_of(v) + written, 7 * tokens * heads * keys * shape(v)[-1])


def short_conv(call: Call) -> Work:
    """Four taps a channel; the windows of its slots read, and moved. A verify writes its rows instead, or
    without records a window a token.
    """
    x, weight = call.get(0, "x"), call.get(1, "weight")
    windows, rows = slot_bytes(call.get(2, "window"), call.get(3, "slots")), bytes_of(x)
    if "states" in call.target:
        moved = entry_bytes(call.get(2, "window")) * shape(x)[0]
    else:
        moved = rows if "verify" in call.target else windows
    return Work(rows + windows + bytes_of(weight), rows + moved, 9 * numel(x))


def slot_bytes(pool: Mapping[str, Any], slots: Mapping[str, Any]) -> Size:
    """Bytes of the entries of ``pool`` that ``slots`` names."""
    return entry_bytes(pool) * shape(slots)[0]


def mla_write(call: Call) -> Work:
    """The latents of this step's tokens."""
    rows = bytes_of(call.get(0, "latent"))
    return Work(rows, rows)


def mla_attend(call: Call) -> Work:
    """Every page of the table, an upper bound: the last page of a request is partly filled."""
    q, kv_b, pages, table = call.args[:4]
    seen = shape(table)[1] * shape(pages)[1]  # positions of one request
    read = entry_bytes(pages) * numel(table)
    width = shape(q)[2] + shape(call.results[0])[2]
    absorbed = 2 * numel(kv_b) * shape(q)[0]
    return Work(
        read + bytes_of(q) + bytes_of(kv_b), None, 2 * shape(q)[0] * shape(q)[1] * seen * width + absorbed
    )


def mla_attend_shard(call: Call) -> Work:
    """The same with absorbed queries, over the rows that this rank keeps of every page."""
    q, pages, table = call.args[:3]
    heads, tokens, width = shape(q)
    seen = shape(table)[1] * shape(pages)[1]
    flops = 2 * heads * tokens * seen * (width + shape(call.results[0])[2])
    return Work(entry_bytes(pages) * numel(table) + bytes_of(q), None, flops)


def mla_attend_gathered(call: Call) -> Work:
    """The whole table of every request comes, in one collective, and every token row meets it: bounds."""
    q, kv_b, _, pages, table, _, _, own = call.args[:8]
    tokens, heads, width = shape(q)
    came, seen = entry_bytes(pages) * numel(table), shape(table)[1] * shape(pages)[1]
    flops = 2 * tokens * heads * seen * (width + shape(call.results[0])[2])
    expansion = 2 * numel(kv_b) * (numel(table) * shape(pages)[1] + tokens)
    read = came + bytes_of(q) + bytes_of(kv_b) + bytes_of(own)
    return Work(read, None, flops + expansion, 1, 1, came)


def half_expansion(call: Call) -> Work:
    """A query into the latents' space, or a mean out of it: a product with a part of kv_b."""
    x, kv_b, width = call.args
    tokens = shape(x)[0] if "absorb" in call.target else shape(x)[1]
    heads = shape(x)[1] if "absorb" in call.target else shape(x)[0]
    flops = 2 * tokens * heads * width * shape(kv_b)[1]
    return Work(bytes_of(x) + bytes_of(kv_b), None, flops)


def experts(call: Call) -> Work:
    """The chosen experts once each, an upper bound: tokens may agree. 6 I L a token and expert."""
    z, ids, first, *rest = call.args
    chosen = numel(ids)
    weights = [t for t in (first, *rest) if isinstance(t, Mapping)]
    most = sympy.Min(chosen, shape(first)[0])
    read = sum((entry_bytes(w) for w in weights), 0) * most
    return Work(bytes_of(z) + bytes_of(ids) + read, None, 6 * chosen * shape(first)[1] * shape(z)[-1])


def latent_tail(call: Call) -> Work:
    """Finalize, norm, up-projection, shared add; both sums over ranks where there is a group, and by its tier
    the rank's part of the weight. A snapshot without tiers has the whole weight and two sums.
    """
    rows, weights, _, _, up, shared, _, group = call.args
    tokens, latent = shape(weights)[0], shape(rows)[1]
    moved = bytes_of(shared) + entry_bytes(rows) * tokens if group else 0
    plain = {"up_to": None, "collectives": 2 if group else 0, "bytes": moved, "weight": bytes_of(up)}
    collectives, sent, weight = (
        by_rows(tokens, key, call.sends or (plain,)) for key in ("collectives", "bytes", "weight")
    )
    multiplied = by_rows(tokens, "weight", call.sends or (plain,), itemsize(up["dtype"]))
    flops = 2 * numel(rows) + 2 * tokens * multiplied + 5 * tokens * latent
    read = sum((bytes_of(t) for t in call.tensors if t is not up), 0) + weight
    return Work(read, None, flops, 1, collectives, sent)


def by_rows(rows: Size, key: str, tiers: Sequence[Mapping[str, Any]], unit: int = 1) -> Size:
    """What the first tier says that reaches so many rows; a case distinction where these are a symbol."""
    sizes = [(size(tier[key]) // unit, tier["up_to"]) for tier in tiers]
    if isinstance(rows, int) or len(sizes) == 1:
        return next(found for found, up_to in sizes if up_to is None or rows <= up_to)
    return sympy.Piecewise(*((found, True if up_to is None else rows <= up_to) for found, up_to in sizes))


RULES: dict[str, Callable[[Call], Work]] = {
    "aten.mm": product(0, 1),
    "aten.bmm": product(0, 1),
    "aten.linear": product(0, 1),
    "aten.addmm": product(1, 2),
    "aten.baddbmm": product(1, 2),
    "aten.scaled_dot_product_attention": attention,
    **{
        f"k3.{name}{form}": delta_rule
        for name in ("kda_prefill", "kda_verify", "kda_verify_states")
        for form in ("", "_into", "_export", "_export_into")
    },
    **{f"k3.short_conv{form}": short_conv for form in ("", "_verify", "_verify_states", "_export")},
    "k3.mla_write": mla_write,
    **{f"k3.{name}": mla_attend for name in ("mla_attend", "mla_attend_block")},
    "k3.mla_write_shard": mla_write,
    "k3.mla_attend_shard": mla_attend_shard,
    "k3.mla_attend_gathered": mla_attend_gathered,
    **{f"k3.{name}": half_expansion for name in ("mla_absorb", "mla_expand")},
    "k3.experts_unfinalized": experts,
    "k3.experts_unfinalized_dense": experts,
    "k3.latent_tail": latent_tail,
}

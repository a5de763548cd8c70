"""What a graph does that the passes are about, counted by who made it, from its snapshot alone.

    index_select(qkv, 0, i)              in self_attn              rows: tokens put into classes and back
    index_select(rows, 0, idx)           of k3.experts_*'s rows    finalizes: their results by token
    embedding(tokens)                                              embedding
    anything else through an index                                 other

Each is one launch. A latent tail reads the experts' rows itself, so that no finalize is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..graphdiff.cost import FUNCTIONALIZED, aten_name, nodes_in
from ..graphdiff.cost_rules import COLLECTIVES, FREE

EMBEDDING = ("aten.embedding.",)
INDEXED = (
    "aten.index_select.",
    "aten.index.",
    "aten._unsafe_index.",
    "aten.gather.",
    "aten.take",
    "aten.index_copy.",
    "aten.index_put.",
    "aten.index_add.",
    "aten.scatter",
)
ATTENTION = "self_attn"  # the name of both attentions in a layer: runtime/model.py
EXPERTS, TAIL = "k3.experts_unfinalized", "k3.latent_tail"
EXPORTS = ("_export", "_export_into")  # how the twins that leave a checkpoint are called
LOOKED_THROUGH = (*FREE, "aten._to_copy.default", "aten.clone.default")


class Counts(NamedTuple):
    """One graph. exports: ops that leave a state or a conv window. collectives: by op, those inside of others
    left out.
    """

    rows: int
    finalizes: int
    embeddings: int
    others: int
    tails: int
    exports: int
    collectives: Mapping[str, int]


def counts(snapshot: Mapping[str, Any]) -> Counts:
    """Count the nodes of a ``k3graph/1`` snapshot."""
    by_id = {node["id"]: node for node in snapshot["nodes"]}
    found = dict.fromkeys(Counts._fields[:-1], 0)
    collectives: dict[str, int] = {}
    for node in by_id.values():
        called = op_of(node)
        if maker := made_by(node, called, by_id):
            found[maker] += 1
        elif called.startswith(TAIL):
            found["tails"] += 1
        elif called.startswith("k3.") and called.split(".")[1].endswith(EXPORTS):
            found["exports"] += 1
        elif called.startswith(COLLECTIVES) and "wait" not in called:
            name = called.split(".")[1]
            collectives[name] = collectives.get(name, 0) + 1
    return Counts(**found, collectives=collectives)


def op_of(node: Mapping[str, Any]) -> str:
    """The op a node calls, functionalised or not, as ATen spells it; empty for what calls none."""
    if not node["op"].startswith("call"):
        return ""
    return node["args"][0]["op"] if FUNCTIONALIZED in node["target"] else aten_name(node["target"])


def made_by(node: Mapping[str, Any], called: str, by_id: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Which count a gather or scatter through an index belongs to; None for another node."""
    if called.startswith(EMBEDDING):
        return "embeddings"
    if not called.startswith(INDEXED):
        return None
    base = next(nodes_in(node["args"]), None)
    if base is not None and any(op_of(one).startswith(EXPERTS) for one in shown_by(base, by_id)):
        return "finalizes"
    return "rows" if ATTENTION in (node["module"] or "").split(".") else "others"


def shown_by(node: int, by_id: Mapping[int, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """A node and those of which it is a view, a part, or the same in another dtype."""
    while True:
        found = by_id[node]
        yield found
        sources = list(nodes_in(found["args"]))
        if op_of(found) not in LOOKED_THROUGH or not sources:
            return
        node = sources[0]


def sent(snapshot: Mapping[str, Any]) -> list[tuple[str, tuple[Any, ...], str]]:
    """The collectives of a graph in order: op, shape and dtype of the operand. All ranks make the same."""
    by_id = {node["id"]: node for node in snapshot["nodes"]}
    found = []
    for node in by_id.values():
        called = op_of(node)
        if called.startswith(COLLECTIVES) and "wait" not in called:
            value = by_id[next(nodes_in(node["args"]))]["value"]
            found.append((called, tuple(value["shape"]), value["dtype"]))
    return found

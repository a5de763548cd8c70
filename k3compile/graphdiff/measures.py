"""What the sizes of a graph measure, in the user's words: by these names they are asked for and given.

%arg4_1: f32[u1, 7168]     (input: p)             u1 = p.0
%s = select(%spans, 0, 2); %n = _local_scalar_dense(%s)     u5 = step.spans[2]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SYMBOL = re.compile(r"[a-z]+\d+")
READS = ("aten._local_scalar_dense.default", "item")
PICKS = ("aten.select.int", "operator.getitem")


def measures(nodes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Symbol -> its names, the best first: the dimensions of inputs that it is (``p.0``), early dimensions
    first, the entry of an input it is read from, an integer input, or the node that made it."""
    dims: dict[str, list[tuple[int, str]]] = {}
    others: dict[str, str] = {}
    by_id = {node["id"]: node for node in nodes}
    for node in nodes:
        value = node["value"]
        name = node.get("input") or node["name"]
        if node["op"] == "placeholder":
            for tensor in tensors_in(value):
                for dim, n in enumerate(tensor["shape"]):
                    if isinstance(n, str) and SYMBOL.fullmatch(n):
                        dims.setdefault(n, []).append((dim, f"{name}.{dim}"))
        if isinstance(value, Mapping) and SYMBOL.fullmatch(value.get("sym", "")):
            others.setdefault(value["sym"], read_from(node, by_id) or name)
    inputs = {s: [name for _, name in sorted(found, key=lambda f: f[0])] for s, found in dims.items()}
    symbols = {**inputs, **others}
    return {
        s: tuple(dict.fromkeys([*inputs.get(s, ()), *([others[s]] if s in others else ())])) for s in symbols
    }


def sizes_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Symbol -> what it measures, of those that are given with the inputs."""
    inner = {node["name"] for node in nodes if node["op"] != "placeholder"}
    return {symbol: first for symbol, (first, *_) in measures(nodes).items() if first not in inner}


def read_from(node: Mapping[str, Any], by_id: Mapping[int, Mapping[str, Any]]) -> str | None:
    """``step.spans[2]`` for a size that is read from an entry of an input; None for another."""
    if node["target"] not in READS or not is_node(node["args"][:1]):
        return None
    picked = by_id[node["args"][0]["node"]]
    index = ""
    if picked["target"] in PICKS and is_node(picked["args"][:1]) and type(picked["args"][-1]) is int:
        index = f"[{picked['args'][-1]}]"
        picked = by_id[picked["args"][0]["node"]]
    return f"{picked.get('input') or picked['name']}{index}" if picked["op"] == "placeholder" else None


def is_node(arguments: Sequence[Any]) -> bool:
    """Whether the only argument is a node."""
    return len(arguments) == 1 and isinstance(arguments[0], Mapping) and arguments[0].keys() == {"node"}


def tensors_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The tensors of a node's value."""
    if isinstance(value, list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping) and "shape" in value:
        yield value

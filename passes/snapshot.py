"""A graph as JSON (``k3graph/1``) and as text: the same words in every process, so that it can be compared.

    {"schema": "k3graph/1", "level": "aten", "symbols": {"s0": {"min": 2, "max": null}, "u0": {...}},
     "nodes": [{"id": 0, "name": "arg0_1", "op": "placeholder", "target": "arg0_1", "args": [], "kwargs": {},
                "value": {"dtype": "float32", "shape": ["s0", 64], "stride": [64, 1], "offset": 0,
                          "device": "cpu", "storage": 0},
                "source": "runtime/model.py:88", "module": "layers.3.mlp", "from": ["linear"],
                "writes": []}, ...],
     "edges": [[0, 3], ...]}                                       producer id, consumer id

Symbols are renamed in the order in which they appear (``s77`` becomes ``s0``, ``u12`` becomes ``u0``),
storages are numbered alike, and no address or set order gets in. A node in an argument is ``{"node": id}``.
``input`` is what the user calls a placeholder (``step.cu_other``), where that is known.
``writes`` are the ids of the arguments that a node changes in place, and "rng" where it draws random numbers.
``sends`` is what an op of ours sends to other ranks, one entry a tier, each up to its number of rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from k3compile.passes.communication import traffic_of
from k3compile.passes.graph import IN_PLACE_OPERATORS, storage_id
from k3compile.passes.graph import value as value_of
from k3compile.passes.input_names import name_of
from k3compile.passes.snapshot_text import text
from k3compile.passes.source import location
from k3compile.passes.symbol_names import SymbolNames, by_number
from torch import fx

SCHEMA = "k3graph/1"
NOT_MEANING = ("name", "input", "source", "from", "module", "writes", "was", "replaces", "sends")
__all__ = ["SCHEMA", "digest", "snapshot", "text"]


def snapshot(gm: fx.GraphModule, level: str = "aten", symbols: SymbolNames | None = None) -> dict[str, Any]:
    """The graph of ``gm`` as plain data: str, int, float, bool, None, lists and dicts.

    symbols: the names of an earlier snapshot of the same compile, to be kept.
    """
    namer = Namer(symbols)
    ids = {node: i for i, node in enumerate(gm.graph.nodes)}
    nodes = [describe(node, ids, namer) for node in ids]
    edges = [[ids[source], ids[node]] for node in ids for source in node.all_input_nodes]
    return {
        "schema": SCHEMA,
        "level": level,
        "symbols": namer.ranges(value_of(node) for node in ids),
        "nodes": nodes,
        "edges": edges,
    }


def digest(data: Mapping[str, Any]) -> str:
    """A name for the computation of a snapshot: names, source lines and provenance do not count."""
    words = {k: v for k, v in data.items() if k in ("schema", "symbols", "edges")}
    words["nodes"] = [
        {k: v for k, v in n.items() if k not in NOT_MEANING}
        | ({"target": "input"} if n["op"] == "placeholder" else {})
        for n in data["nodes"]
    ]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


class Namer:
    """Gives symbols, storages and node names their names, in order of first appearance."""

    def __init__(self, symbols: SymbolNames | None = None) -> None:
        self.symbols = symbols or SymbolNames()
        self.met: dict[str, sympy.Symbol] = {}  # new name -> symbol, of this snapshot
        self.storages: dict[int, int] = {}

    def expression(self, expr: sympy.Expr) -> str:
        """An expression over the new names, spelled the same way each time."""
        met = {s: self.symbols.name(s.name) for s in sorted(expr.free_symbols, key=by_number)}
        self.met.update((name, symbol) for symbol, name in met.items())
        return str(expr.xreplace({s: sympy.Symbol(name, integer=True) for s, name in met.items()}))

    def storage(self, tensor: torch.Tensor) -> int | None:
        key = storage_id(tensor)
        return None if key is None else self.storages.setdefault(key, len(self.storages))

    def ranges(self, values: Iterator[Any]) -> dict[str, dict[str, int | None]]:
        """What the compile knows of each named symbol: {name: {"min", "max"}}, None for unbounded."""
        shape_env = next((e for e in map(shape_env_of, values) if e is not None), None)
        known = shape_env.var_to_range if shape_env else {}
        found = {}
        for name, symbol in self.met.items():
            bounds = known.get(symbol)
            found[name] = {
                "min": bound(bounds.lower) if bounds else None,
                "max": bound(bounds.upper) if bounds else None,
            }
        return found

    def node(self, name: str) -> str:
        """A node's name; Dynamo calls the inputs that carry sizes after their symbols."""
        return self.symbols.known.get(name, name)


def describe(node: fx.Node, ids: Mapping[fx.Node, int], namer: Namer) -> dict[str, Any]:
    """One entry of ``nodes``."""
    value = encode_value(value_of(node), namer)  # first: it names the symbols that inputs are called after
    name = namer.node(node.name)
    target = name if node.op == "placeholder" else target_name(node.target)
    called = name_of(node)
    return {
        "id": ids[node],
        "name": name,
        **({"input": called} if called else {}),
        "op": node.op,
        "target": target,
        "args": [encode(a, ids, namer) for a in node.args],
        "kwargs": {k: encode(v, ids, namer) for k, v in sorted(node.kwargs.items())},
        "value": value,
        "source": source_line(node),
        "module": module_path(node),
        "from": provenance(node),
        "writes": writes(node, ids),
        **({"sends": sent} if (sent := sends(node, namer)) else {}),
    }


def sends(node: fx.Node, namer: Namer) -> list[dict[str, Any]]:
    """What a node sends to other ranks, and reads of a weight it shares with them, by its number of rows."""
    return [
        {
            "up_to": traffic.up_to,
            "collectives": traffic.collectives,
            "bytes": size(traffic.sent, namer),
            "weight": size(traffic.weight, namer),
        }
        for traffic in traffic_of(node)
    ]


def source_line(node: fx.Node) -> str | None:
    """The line of the user's code behind a node, as ``folder/file.py:line``: the same on every machine."""
    place = location(node)
    return f"{'/'.join(Path(place.file).parts[-2:])}:{place.line}" if place else None


def module_path(node: fx.Node) -> str | None:
    """The module whose code made a node, as a path from the model: ``layers.3.mlp``."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    return (
        re.sub(r"^L\['\w+'\]\.?|\['(\w+)'\]", r"\1", paths[-1]).replace("._modules.", ".") if paths else None
    )


def writes(node: fx.Node, ids: Mapping[fx.Node, int]) -> list[int | str]:
    """What a node changes besides its result: ids of arguments written in place, "rng" for a random draw."""
    if node.op not in ("call_function", "call_method"):
        return []
    found: list[int | str] = []
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        given = dict(zip([a.name for a in target._schema.arguments], node.args)) | dict(node.kwargs)
        written = [given.get(a.name) for a in target._schema.arguments if a.is_write]
        found += ["rng"] if torch.Tag.nondeterministic_seeded in target.tags else []
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or target in IN_PLACE_OPERATORS
        written = [node.args[0] if in_place and node.args else None, node.kwargs.get("out")]
    nodes: list[fx.Node] = []
    fx.map_arg(written, nodes.append)
    return [*dict.fromkeys(ids[n] for n in nodes), *found]


def provenance(node: fx.Node) -> list[str]:
    """Names of the nodes it came from, in the graphs before this one, oldest first."""
    found: list[str] = []
    step = node.meta.get("from_node") or []
    while step:
        found.append(step[-1].name)
        step = step[-1].from_node
    return found[::-1]


def encode(value: Any, ids: Mapping[fx.Node, int], namer: Namer) -> Any:
    """An argument as plain data; what has no plain form becomes ``{"type": ...}``."""
    if isinstance(value, fx.Node):
        return {"node": ids[value]}
    if isinstance(value, (list, tuple)):
        return [encode(v, ids, namer) for v in value]
    if isinstance(value, dict):
        return {str(k): encode(v, ids, namer) for k, v in sorted(value.items(), key=lambda i: str(i[0]))}
    if isinstance(value, slice):
        return {"slice": [encode(v, ids, namer) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"sym": namer.expression(value.node.expr)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    return {"op": target_name(value)} if callable(value) else {"type": type(value).__name__}


def encode_value(value: Any, namer: Namer) -> Any:
    """A node's fake value: a tensor, a size, or a list of them; None where it has none."""
    if isinstance(value, (list, tuple)):
        return [encode_value(v, namer) for v in value]
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_nested
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [size(s, namer) for s in value.shape],
            "stride": [size(s, namer) for s in value.stride()] if strided else [],
            "offset": size(value.storage_offset(), namer) if strided else 0,
            "device": value.device.type,
            "storage": namer.storage(value),
        }
    if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return encode(value, {}, namer)
    return None


def size(value: int | torch.SymInt, namer: Namer) -> int | str:
    return namer.expression(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def target_name(target: Any) -> str:
    """``aten.mm.default``, ``operator.getitem``, ``torch.rms_norm``, or a method's name."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", type(target).__name__)
    module = (getattr(target, "__module__", None) or "").removeprefix("torch.")
    module = "operator" if getattr(operator, name, None) is target else module
    return f"{module}.{name}" if module else name


def shape_env_of(value: Any) -> Any:
    """The shape environment behind a fake tensor or a symbolic size, or None."""
    if isinstance(value, torch.SymInt):
        return value.node.shape_env
    mode = getattr(value, "fake_mode", None)
    return getattr(mode, "shape_env", None)


def bound(value: Any) -> int | None:
    return int(value) if value.is_Integer and abs(int(value)) < 2**62 else None

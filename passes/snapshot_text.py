"""A snapshot as lines to read and to keep as goldens; needs no torch.

%x: f32[s0, 64]
%mm: f32[s0, 32] = aten.mm.default(%x, %w)
return %mm
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3compile.passes.expressions import parse

SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16",
    "int64": "i64", "int32": "i32", "uint8": "u8", "bool": "b8",
}  # fmt: skip


def text(data: Mapping[str, Any]) -> str:
    """One line a node, ended by a newline."""
    names = {n["id"]: f"%{n['name']}" for n in data["nodes"]}
    return "\n".join(line(node, names) for node in data["nodes"]) + "\n"


def line(node: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """``%mm: f32[s0, 32] = aten.mm.default(%x, %w)  # folder/file.py:3``"""
    kwargs = [f"{k}={spell(v, names)}" for k, v in node["kwargs"].items()]
    arguments = ", ".join([*(spell(a, names) for a in node["args"]), *kwargs])
    if node["op"] == "placeholder":
        called = f"  # {node['input']}" if node.get("input") else ""
        return f"{names[node['id']]}: {shape_text(node['value'])}{called}"
    if node["op"] == "output":
        return f"return {arguments}"
    head = f"{names[node['id']]}: {shape_text(node['value'])} = {node['target']}({arguments})"
    return head + (f"  # {node['source']}" if node["source"] else "")


def spell(value: Any, names: Mapping[int, str]) -> str:
    """An encoded argument as text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(spell(v, names) for v in value)}]"
    if isinstance(value, Mapping):
        (kind, inner), *rest = value.items() or [("", "")]
        if kind == "node" and not rest:
            return names[inner]
        if kind in ("sym", "op", "torch", "float", "type") and not rest:
            return str(inner)
        return "{" + ", ".join(f"{k}: {spell(v, names)}" for k, v in value.items()) + "}"
    return repr(value)


def shape_text(value: Any) -> str:
    """``f32[s0, 64]``, with the strides where they are not the packed ones."""
    if isinstance(value, list):
        return f"({', '.join(shape_text(v) for v in value)})"
    if not isinstance(value, dict):
        return "-" if value is None else str(value)
    if "shape" not in value:
        return str(next(iter(value.values())))
    dtype = SHORT.get(value["dtype"], value["dtype"])
    packed = is_packed(value["shape"], value["stride"])
    stride = "" if packed else f" stride {value['stride']}".replace("'", "")
    return f"{dtype}[{', '.join(map(str, value['shape']))}]{stride}"


def is_packed(shape: list[int | str], stride: list[int | str]) -> bool:
    """Whether strides are those of a dense row-major tensor, by their spelling."""
    expected = parse(1)
    for n, step in zip(reversed(shape), reversed(stride)):
        if n != 1 and step != expected and parse(step) != expected:
            return False
        expected = expected * parse(n)
    return True

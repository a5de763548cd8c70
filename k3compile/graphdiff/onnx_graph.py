"""A snapshot as an ONNX model to look at in Netron: the same nodes under domains of their own, not to be run.

    aten.mm.default(%x, %w)             pkg.aten :: mm        inputs x, w; metadata k3.source, k3.stride, ...
    k3.rms_norm.default(%x, %w, 1e-05)  pkg.k3 :: rms_norm    attribute arg2 = 1e-05
    size s0                             dim_param "s0"

What ONNX has no word for (in-place writes, aliases, strides) is kept as metadata only. With a diff the model
is the new graph, each node marked with ``k3.diff``, and the nodes that went away hang on as dead ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

DTYPES = {
    "float32": "FLOAT", "float64": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int64": "INT64",
    "int32": "INT32", "int16": "INT16", "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
    "complex64": "COMPLEX64", "complex128": "COMPLEX128", "float8_e4m3fn": "FLOAT8E4M3FN",
    "float8_e5m2": "FLOAT8E5M2", "float8_e8m0fnu": "FLOAT8E8M0",
}  # fmt: skip
IR_VERSION = 10  # the first that lets a node carry metadata


def onnx_package() -> Any:
    """The optional package. Raises ValueError with the one thing to do where it is absent."""
    try:
        import onnx
    except ImportError as error:
        raise ValueError("ONNX export needs the onnx package: pip install 'k3compile[onnx]'") from error
    return onnx


def to_onnx(snapshot: Mapping[str, Any]) -> Any:
    """A ``k3graph/1`` -> an ``onnx.ModelProto`` that onnx.checker accepts."""
    writer = Writer()
    for node in snapshot["nodes"]:
        writer.add(node)
    return writer.model(snapshot)


def diff_to_onnx(diff: Mapping[str, Any]) -> Any:
    """A ``k3diff/1`` -> one model of both graphs; see the module."""
    marks = {}
    for change in diff["changes"]:
        side, number = (
            ("after", change["after"]) if change["after"] is not None else ("before", change["before"])
        )
        marks.setdefault((side, number), []).append(change)
    writer = Writer()
    outputs = [n for n in diff["after"]["nodes"] if n["op"] == "output"]
    for node in diff["after"]["nodes"]:
        if node["op"] != "output":
            writer.add(node, marks.get(("after", node["id"]), ()))
    new_values = writer.values
    writer.values = {b: new_values[a] for b, a in diff["pairs"] if a in new_values}
    paired = {b for b, _ in diff["pairs"]}
    for node in diff["before"]["nodes"]:
        if node["id"] not in paired and node["op"] != "output":
            gone = marks.get(("before", node["id"])) or [{"kind": "removed", "detail": ""}]
            writer.add(node, gone, prefix="removed/")
    writer.values = new_values
    for node in outputs:
        writer.add(node)
    return writer.model(diff["after"])


class Writer:
    """Collects nodes; ``values`` maps the snapshot's node ids to ONNX value names."""

    def __init__(self) -> None:
        self.onnx = onnx_package()
        self.values: dict[int, str] = {}
        self.taken: set[str] = set()
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.infos: list[Any] = []

    def add(
        self, node: Mapping[str, Any], changes: Iterable[Mapping[str, Any]] = (), prefix: str = ""
    ) -> None:
        """One node of a snapshot, whose producers are there already."""
        if node["op"] == "output":
            return self.output(node)
        name = self.values[node["id"]] = self.unused(prefix + node["name"])
        info = self.info(name, node["value"])
        if node["op"] == "placeholder" and not prefix:
            self.inputs.append(info or self.untyped(name))
            self.mark(self.inputs[-1], node, changes)
            return None
        if info is not None:
            self.infos.append(info)
        inputs, attributes = self.arguments(node)
        domain, kind = domain_and_kind("fx.placeholder" if node["op"] == "placeholder" else node["target"])
        made = self.onnx.helper.make_node(kind, inputs, [name], name=name, domain=domain, **attributes)
        self.mark(made, node, changes)
        self.nodes.append(made)
        return None

    def output(self, node: Mapping[str, Any]) -> None:
        """What the graph returns, through one node, as a value may be returned twice or be an input."""
        inputs = [self.values[i] for i in node_ids([*node["args"], *node["kwargs"].values()])]
        names = [self.unused(f"output_{i}") for i in range(len(inputs))]
        if not names:
            return
        self.nodes.append(self.onnx.helper.make_node("output", inputs, names, name="output", domain="pkg.fx"))
        known = {info.name: info for info in [*self.infos, *self.inputs]}
        for name, source in zip(names, inputs):
            made = self.untyped(name)
            if source in known:
                made.type.CopyFrom(known[source].type)
            self.outputs.append(made)

    def arguments(self, node: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Nodes become inputs in order, all else attributes by position or keyword."""
        inputs, attributes = [], {}
        named = [*((f"arg{i}", a) for i, a in enumerate(node["args"])), *node["kwargs"].items()]
        for key, value in named:
            inside = [self.values[i] for i in node_ids(value)]
            inputs += inside
            if not (inside and isinstance(value, dict)):
                attributes[key] = attribute(value, self.values)
        return inputs, attributes

    def mark(self, made: Any, node: Mapping[str, Any], changes: Iterable[Mapping[str, Any]]) -> None:
        """Metadata: where it came from, how it lies in memory, what the diff says."""
        value = node["value"] if isinstance(node["value"], dict) and "shape" in node["value"] else {}
        facts = {
            "k3.source": node.get("source"),
            "k3.module": node.get("module"),
            "k3.from": " <- ".join(reversed(node.get("from") or [])),
            "k3.stride": json.dumps(value["stride"]) if value else None,
            "k3.storage": str(value["storage"]) if value else None,
            "k3.diff": "+".join(dict.fromkeys(c["kind"] for c in changes)),
            "k3.diff.detail": "; ".join(c["detail"] for c in changes if c.get("detail")),
        }
        for key, text in facts.items():
            if text:
                made.metadata_props.add(key=key, value=text)

    def info(self, name: str, value: Any) -> Any:
        """Type and shape where they are known, else None."""
        helper, types = self.onnx.helper, self.onnx.TensorProto
        if isinstance(value, dict) and value.get("dtype") in DTYPES:
            return helper.make_tensor_value_info(name, getattr(types, DTYPES[value["dtype"]]), value["shape"])
        if isinstance(value, bool):
            return helper.make_tensor_value_info(name, types.BOOL, [])
        if isinstance(value, int) or (isinstance(value, dict) and "sym" in value):
            return helper.make_tensor_value_info(name, types.INT64, [])
        return None

    def untyped(self, name: str) -> Any:
        """A value that is no tensor, or that nothing is known of."""
        return self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.UNDEFINED, None)

    def unused(self, name: str) -> str:
        """``name``, or it with a number: value names of a model differ."""
        found, number = name or "value", 1
        while found in self.taken:
            found, number = f"{name}.{number}", number + 1
        self.taken.add(found)
        return found

    def model(self, snapshot: Mapping[str, Any]) -> Any:
        """Everything added so far."""
        helper = self.onnx.helper
        graph = helper.make_graph(self.nodes, "k3graph", self.inputs, self.outputs, value_info=self.infos)
        domains = [helper.make_opsetid(d, 1) for d in sorted({n.domain for n in self.nodes})]
        imports = [helper.make_opsetid("", 21), *domains]
        made = helper.make_model(
            graph, opset_imports=imports, producer_name="k3compile", ir_version=IR_VERSION
        )
        facts = {"k3.schema": snapshot["schema"], "k3.level": snapshot["level"]}
        helper.set_model_props(made, facts | {"k3.symbols": json.dumps(snapshot["symbols"])})
        return made


def domain_and_kind(target: str) -> tuple[str, str]:
    """``aten.index_select.default`` -> (pkg.aten, index_select); an overload other than default stays."""
    head, _, rest = target.partition(".")
    if not rest:
        return "pkg.fx", target
    return f"pkg.{head}", rest.removesuffix(".default")


def node_ids(value: Any) -> list[int]:
    """Nodes inside an encoded argument, in order."""
    if isinstance(value, list):
        return [i for v in value for i in node_ids(v)]
    if isinstance(value, dict):
        if set(value) == {"node"} and isinstance(value["node"], int):
            return [value["node"]]
        return [i for v in value.values() for i in node_ids(v)]
    return []


def attribute(value: Any, names: Mapping[int, str]) -> int | float | str | list[int]:
    """An encoded argument as ONNX knows attributes; what it has no type for is spelled."""
    if isinstance(value, (bool, int)) and -(2**63) <= int(value) < 2**63:
        return int(value)
    if isinstance(value, (float, str)):
        return value
    if value and isinstance(value, list) and all(type(v) is int and -(2**63) <= v < 2**63 for v in value):
        return value
    return spelled(value, names)


def spelled(value: Any, names: Mapping[int, str]) -> str:
    """An encoded argument as text, nodes by name."""
    if isinstance(value, list):
        return f"[{', '.join(spelled(v, names) for v in value)}]"
    if isinstance(value, dict) and len(value) == 1:
        (kind, inner), *_ = value.items()
        return f"%{names.get(inner, inner)}" if kind == "node" else spelled(inner, names)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {spelled(v, names)}' for k, v in value.items())}}}"
    return str(value)

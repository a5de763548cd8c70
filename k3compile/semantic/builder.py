"""Writing an ONNX graph one operator at a time, values by name, weights by their checkpoint's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..graphdiff.onnx_graph import onnx_package
from ..kernels.mxfp4 import GROUP

OPSET = 27  # the first with LinearAttention and CausalConvWithState
LARGEST = 2**31 - 2**20  # bytes that one protobuf file holds, with room for the graph


@dataclass
class Written:
    """What all scopes of one graph share."""

    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class Builder:
    """A scope of the graph: names made in it start with ``prefix``."""

    prefix: str = ""
    written: Written = field(default_factory=Written)
    onnx: Any = field(default_factory=onnx_package)

    def at(self, name: str) -> Builder:
        """The same graph, one scope deeper."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Append one operator; its value, or a list of ``outputs`` values."""
        name = f"{self.prefix}{kind}_{len(self.written.nodes)}"
        values = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.written.nodes.append(self.onnx.helper.make_node(kind, inputs, values, name=name, **attributes))
        return values[0] if outputs == 1 else values

    def weight(self, name: str, value: Tensor) -> str:
        """An initializer in float32, named as the parameter."""
        array = value.detach().to("cpu", torch.float32).contiguous().numpy()
        return self.keep(self.prefix + name, self.onnx.numpy_helper.from_array(array, self.prefix + name))

    def packed(self, name: str, codes: Tensor, scale: Tensor) -> str:
        """MXFP4 codes [..., n/2] and scales [..., n/32] as they lie in the file -> values [..., n].

        Both formats put the first value of a byte in its low bits, so the bytes are handed over as they are.
        """
        types, full = self.onnx.TensorProto, self.prefix + name
        shape = [*codes.shape[:-1], codes.shape[-1] * 2]
        quantised = types(name=full, data_type=types.FLOAT4E2M1, dims=shape, raw_data=bytes_of(codes))
        scales = types(
            name=f"{full}_scale", data_type=types.FLOAT8E8M0, dims=scale.shape, raw_data=bytes_of(scale)
        )
        pair = self.keep(full, quantised), self.keep(f"{full}_scale", scales)
        axis = len(shape) - 1
        return self.op("DequantizeLinear", *pair, axis=axis, block_size=GROUP, output_dtype=types.FLOAT)

    def keep(self, name: str, tensor: Any) -> str:
        """Add an initializer once. Raises ValueError where the file would be larger than ONNX allows."""
        if name not in self.written.weights:
            self.written.weights[name] = tensor
            self.written.bytes += len(tensor.raw_data)
            if self.written.bytes > LARGEST:
                raise ValueError(
                    "the weights pass the 2 GB of one ONNX file: export one layer with --layer N"
                )
        return name

    def number(self, value: float) -> str:
        """A float32 scalar."""
        name = f"number_{value!r}"
        made = self.onnx.helper.make_tensor(name, self.onnx.TensorProto.FLOAT, [], [value])
        return self.written.weights.setdefault(name, made).name

    def ints(self, *values: int) -> str:
        """An int64 vector."""
        name = "ints_" + "_".join(map(str, values))
        made = self.onnx.helper.make_tensor(name, self.onnx.TensorProto.INT64, [len(values)], values)
        return self.written.weights.setdefault(name, made).name

    def linear(self, x: str, name: str, weight: Tensor) -> str:
        """x [..., in] and weight [out, in] -> [..., out]"""
        return self.op("MatMul", x, self.op("Transpose", self.weight(f"{name}.weight", weight), perm=[1, 0]))

    def rms_norm(self, x: str, name: str, weight: Tensor, eps: float) -> str:
        """x / rms(x) * weight over the last dimension."""
        return self.op("RMSNormalization", x, self.weight(name, weight), axis=-1, epsilon=eps)

    def heads(self, x: str, heads: int, width: int) -> str:
        """[B, T, H * K] -> [B, T, H, K]"""
        return self.op("Reshape", x, self.ints(0, 0, heads, width))

    def flat(self, x: str) -> str:
        """[B, T, H, K] -> [B, T, H * K]"""
        return self.op("Reshape", x, self.ints(0, 0, -1))

    def input(self, name: str, *shape: int | str, kind: str = "FLOAT") -> str:
        """A graph input; sizes in words are symbolic."""
        self.written.inputs.append(self.described(name, shape, kind))
        return name

    def output(self, name: str, value: str, *shape: int | str, kind: str = "FLOAT") -> None:
        """Make a value a graph output under a name of its own."""
        self.written.nodes.append(self.onnx.helper.make_node("Identity", [value], [name], name=name))
        self.written.outputs.append(self.described(name, shape, kind))

    def described(self, name: str, shape: Sequence[int | str], kind: str) -> Any:
        helper, types = self.onnx.helper, self.onnx.TensorProto
        return helper.make_tensor_value_info(name, getattr(types, kind), list(shape))

    def model(self, name: str) -> Any:
        """The finished ``onnx.ModelProto``, checked with its shapes inferred."""
        helper, done = self.onnx.helper, self.written
        graph = helper.make_graph(
            done.nodes, name, done.inputs, done.outputs, initializer=[*done.weights.values()]
        )
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="k3compile"
        )
        self.onnx.checker.check_model(made, full_check=True)
        return made


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a uint8 (or 8-bit float) tensor, in order."""
    return tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()

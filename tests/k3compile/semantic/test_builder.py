"""The builder keeps bytes as they lie in the file, names things once, refuses what no file can hold."""

import numpy as np
import pytest
import torch
from k3compile.kernels.mxfp4 import pack, unpack
from onnx.reference import ReferenceEvaluator

from k3compile.semantic import builder
from k3compile.semantic.builder import Builder


def test_packed_weights_mean_what_our_unpack_says():
    codes = torch.arange(256, dtype=torch.uint8).repeat(3).view(2, 3, 128)
    scale = torch.randint(1, 254, (2, 3, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    build = Builder()
    build.output("w", build.packed("w_packed", codes, scale), 2, 3, 256)
    (got,) = ReferenceEvaluator(build.model("m")).run(None, {})
    assert torch.equal(torch.from_numpy(np.array(got)), unpack(codes, scale, torch.float32))


def test_a_packed_matrix_survives_the_round_trip():
    w = torch.randn(4, 64)
    packed, scale = pack(w)
    build = Builder()
    build.output("w", build.packed("w_packed", packed, scale), 4, 64)
    (got,) = ReferenceEvaluator(build.model("m")).run(None, {})
    assert torch.equal(torch.from_numpy(np.array(got)), unpack(packed, scale, torch.float32))


def test_scopes_nest_and_a_weight_is_kept_once():
    build = Builder()
    inner = build.at("layers.3").at("ffn")
    assert inner.weight("gate", torch.ones(2)) == inner.weight("gate", torch.ones(2)) == "layers.3.ffn.gate"
    assert len(build.written.weights) == 1
    value = inner.op("Exp", "layers.3.ffn.gate")
    assert value.startswith("layers.3.ffn.Exp_")
    assert build.ints(0, -1) == build.ints(0, -1)
    assert build.number(0.5) == build.number(0.5)


def test_more_weights_than_one_file_holds_are_refused(monkeypatch):
    monkeypatch.setattr(builder, "LARGEST", 100)
    with pytest.raises(ValueError, match="2 GB of one ONNX file: export one layer"):
        Builder().weight("w", torch.zeros(100))


def test_a_graph_that_does_not_fit_together_is_not_handed_out():
    build = Builder()
    build.input("x", "B", 4)
    build.output("y", build.op("MatMul", "x", build.weight("w", torch.ones(3, 2))), "B", 2)
    with pytest.raises(Exception, match="ncompatible dimensions"):
        build.model("m")

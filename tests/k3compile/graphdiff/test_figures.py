"""Costs are sums over symbols until sizes are given, by symbol or by what it measures."""

import pytest
import torch
from k3compile.passes.snapshot import snapshot
from torch.fx.experimental.proxy_tensor import make_fx

from k3compile.graphdiff.cost import cost


def cost_of(function, *inputs, tracing_mode="fake"):
    return cost(snapshot(make_fx(function, tracing_mode=tracing_mode)(*inputs)))


def test_sizes_are_given_by_symbol_or_by_what_they_measure():
    found = cost_of(lambda x: x + 1, torch.randn(6, 3), tracing_mode="symbolic")
    assert found.unknown == ["s0", "s1"]
    assert found.symbols == {"s0": "x_1.0", "s1": "x_1.1"}
    assert found.at({"x_1.0": 10, "s1": 3})["bytes_read"] == 120


def test_a_missing_size_is_asked_for_by_what_it_measures():
    found = cost_of(lambda x: x + 1, torch.randn(6, 3), tracing_mode="symbolic")
    with pytest.raises(
        ValueError, match=r"no value for x_1.1; sizes of this graph: x_1.0 \(s0\), x_1.1 \(s1\)"
    ):
        found.at({"s0": 10})
    with pytest.raises(ValueError, match=r"no size is called T;"):
        found.at({"s0": 10, "s1": 1, "T": 64})


def test_it_becomes_plain_data():
    found = cost_of(lambda x: x + 1, torch.randn(6, 3), tracing_mode="symbolic").to_json()
    assert found["bytes_read"] == "4*s0*s1"
    assert found["launches"] == 1

"""A function as a functional ATen graph with values, made without Dynamo, for tests that read a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from k3compile.passes.graph import fake_mode_of
from k3compile.passes.prover import Prover
from torch import fx
from torch._functorch.aot_autograd import aot_function


def traced(fn: Callable[..., Any], *args: torch.Tensor, symbolic: bool = True) -> tuple[fx.Graph, Prover]:
    """The graph of ``fn``, sizes other than 0 and 1 as symbols, and a prover of their facts."""
    graphs = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    with torch.no_grad():
        aot_function(fn, fw_compiler=keep, dynamic=symbolic)(*args)
    mode = fake_mode_of(graphs[0])
    return graphs[0], Prover(mode.shape_env if mode is not None else None)


def inputs(graph: fx.Graph) -> list[fx.Node]:
    """The tensors that the graph is given, in order."""
    given = graph.find_nodes(op="placeholder")
    return [node for node in given if isinstance(node.meta["val"], torch.Tensor)]


def result(graph: fx.Graph) -> fx.Node:
    """The node that the graph returns, or the first of them."""
    (returned,) = graph.output_node().args
    return returned[0] if isinstance(returned, (list, tuple)) else returned

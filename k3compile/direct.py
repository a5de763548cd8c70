"""A layer's graph, or the head's, called without Dynamo's frame: the inputs by the names Dynamo gave them.

    first call of a layer     Dynamo compares hundreds of guards and runs the graph that fits
    from then on              look(arguments) as before?  graph(*inputs named by the graph)  :  Dynamo again

Guards look at each tensor of a layer six times, and the frame changes a dozen settings: for one token that
takes half a millisecond a layer, more than some of its arithmetic. What they protect from is looked at here
in a few microseconds, but for the layer itself: what it is made of must not change once it has run. Its
tensors are looked up in each call, so they may be replaced by others of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from .kernels.native import alone

FEW_ROWS = 8  # up to which loops between our kernels are shorter than it takes to start threads
Graph = Callable[..., Any]
Inputs = Callable[..., tuple]


class Watched:
    """Learns which graph a call through Dynamo runs. through_dynamo: calls that were asked about."""

    arguments = ""  # of the function that is compiled, as its source names them

    def __init__(self) -> None:
        self.through_dynamo = 0
        self._ran: tuple[Graph, Inputs] | None = None

    def watched(self, gm: fx.GraphModule, compile_graph: Callable[[], Graph]) -> Graph:
        """The compiled graph as Dynamo is to call it; ``gm`` is read before it is compiled."""
        inputs = inputs_of(gm, self.arguments)
        graph = compile_graph()
        if inputs is None:
            return graph

        def run(*args: Any) -> Any:
            self._ran = graph, inputs
            return graph(*args)

        return run

    def ask(self, forward: Graph, *args: Any) -> tuple[Any, tuple[Graph, Inputs] | None]:
        """What ``forward``, Dynamo's, returns, and the graph that it ran if that can be called directly."""
        self._ran = None
        self.through_dynamo += 1
        return forward(*args), self._ran


class Direct(Watched):
    """Which graph each layer runs, once it ran through Dynamo."""

    arguments = "self, p, blocks, pools, step"  # of DecoderLayer.forward

    def __init__(self) -> None:
        super().__init__()
        self._bound: WeakKeyDictionary[nn.Module, tuple[Any, Hashable, Graph, Inputs]]
        self._bound = WeakKeyDictionary()
        self._step: tuple[Any, Hashable] = (None, None)

    def call(
        self, forward: Graph, layer: nn.Module, p: Tensor, blocks: Tensor, pools: Any, step: Any
    ) -> Tensor:
        """What ``forward``, Dynamo's, returns for these arguments."""
        look = self._look(p, blocks, step)
        known = self._bound.get(layer)
        if known is not None and known[0] is pools and known[1] == look:
            _, _, graph, inputs = known
            if p.shape[0] > FEW_ROWS:
                return graph(*inputs(layer, p, blocks, pools, step))[0]
            with alone:
                return graph(*inputs(layer, p, blocks, pools, step))[0]
        result, ran = self.ask(forward, layer, p, blocks, pools, step)
        if ran is not None:
            self._bound[layer] = (pools, look, *ran)
        return result

    def _look(self, p: Tensor, blocks: Tensor, step: Any) -> Hashable:
        """What Dynamo would compile anew for; a step is looked at once for all layers."""
        of, seen = self._step
        if of is not step:
            seen = tuple((t.dtype, t.device, t.dim(), t.stride()[-1:], t.is_inference()) for t in step)
            fixed = step.spans.shape, step.export_offset.shape, step.export_slot.shape
            seen = seen, fixed, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._step = step, seen
        return seen, shape_of(p), shape_of(blocks)


class DirectHead(Watched):
    """The same for the product that gives scores, of which there is one."""

    arguments = "hidden, head"  # of model.scores

    def __init__(self) -> None:
        super().__init__()
        self._bound: tuple[Hashable, Graph, Inputs] | None = None

    def call(self, forward: Graph, hidden: Tensor, head: Tensor) -> Tensor:
        """What ``forward``, Dynamo's, returns for these arguments."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        look = shape_of(hidden), shape_of(head), head.shape, head.stride(), modes
        if self._bound is not None and self._bound[0] == look:
            _, graph, inputs = self._bound
            if hidden.shape[0] > FEW_ROWS:
                return graph(*inputs(hidden, head))[0]
            with alone:
                return graph(*inputs(hidden, head))[0]
        result, ran = self.ask(forward, hidden, head)
        if ran is not None:
            self._bound = (look, *ran)
        return result


def shape_of(t: Tensor) -> Hashable:
    """All but the number of rows, which is free."""
    return t.dtype, t.device, t.dim(), t.shape[-1], t.is_contiguous(), t.is_inference(), t.requires_grad


def inputs_of(gm: fx.GraphModule, arguments: str) -> Inputs | None:
    """(arguments) -> the inputs of a graph that Dynamo made of a function of those, read as it names them;
    None for a graph that names anything else, or that returns more than one tensor.
    """
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is None or not source.name.startswith("L["):
            return None
        names.append(source.name)
    (results,) = gm.graph.output_node().args
    if len(results) != 1:
        return None
    code = f"lambda {arguments}: ({', '.join(names)},)"
    for argument in arguments.split(", "):
        code = code.replace(f"L['{argument}']", argument)
    return None if "L[" in code else eval(code, {})  # names of Dynamo, which evaluates them in the same way

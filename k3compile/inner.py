"""The inner compilers: what turns a graph into a callable, with our ATen passes called at the right moment.

    inductor      AOTAutograd, [passes], Inductor             caches keep the result
    aot_eager     AOTAutograd, [passes], generated Python     mutating ops write in place (passes/in_place.py)
    eager         the same, run node by node: an error names the line of the model that made the node
    any other     as aot_eager, but islands of the graph are given to another compiler (islands.py)

Passes see only inference graphs: AOTAutograd alone knows which those are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .passes.hazards import hazards
from .passes.in_place import unsafe_views, write_in_place
from .torch_private import (
    CustomInferenceAwareGraphPass,
    InductorError,
    aot_autograd,
    compile_with_inductor,
    min_cut_partition,
    registered_backend,
)

Optimise = Callable[[fx.GraphModule], None]
VERSION = torch.__version__.split("+")[0]


class UnsafeForInductor(RuntimeError):
    """The graph holds what Inductor would compute wrongly without saying so."""


class AtenPasses(CustomInferenceAwareGraphPass):
    """Our passes as Inductor calls them, before its own. ``name`` is for its caches; None: no caching.

    Without ``optimise`` only the guard against what Inductor computes wrongly, for training graphs too.
    """

    def __init__(self, optimise: Optimise | None, name: str | None) -> None:
        self.optimise, self.name = optimise, name
        self.refused: UnsafeForInductor | None = None

    def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
        if self.optimise is not None and not is_inference:
            return
        if views := unsafe_views(graph):
            self.refuse(
                f"{', '.join(views)} is a strided view at a data-dependent offset; Inductor would write "
                "at the start of the tensor instead"
            )
        if self.optimise is not None:
            self.optimise(graph.owning_module)
        if found := hazards(graph):
            self.refuse(f"{'; '.join(found)}: Inductor {VERSION} may compute that wrongly")

    def refuse(self, why: str) -> None:
        """Raise, and remember: Inductor wraps what is raised."""
        self.refused = UnsafeForInductor(why)
        raise self.refused

    def uuid(self) -> str | None:
        return self.name


def inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    optimise: Optimise | None,
    name: str | None,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Compile with Inductor. Raises UnsafeForInductor before any wrong code is made."""
    passes = AtenPasses(optimise, name)
    theirs = patches.get("post_grad_custom_pre_pass") or []
    theirs = theirs if isinstance(theirs, (list, tuple)) else [theirs]
    hook = [passes, *theirs] if theirs else passes
    try:
        return compile_with_inductor(gm, inputs, patches | {"post_grad_custom_pre_pass": hook})
    except InductorError:  # it wraps what a pass raises
        if passes.refused is not None:
            raise passes.refused from None
        raise


def aot(gm: fx.GraphModule, inputs: Sequence[Any], optimise: Optimise, by_node: bool) -> Callable[..., Any]:
    """Compile to generated Python, or run node by node."""

    def plain(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list], Any]:
        return boxed(graph_module, by_node)

    def inference(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list], Any]:
        optimise(graph_module)
        write_in_place(graph_module)
        graph_module.recompile()
        return boxed(graph_module, by_node)

    compiler = aot_autograd(
        fw_compiler=plain,
        bw_compiler=plain,
        inference_compiler=inference,
        partition_fn=min_cut_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(gm, inputs)


def boxed(gm: fx.GraphModule, by_node: bool) -> Callable[[list], Any]:
    """A callable that takes its arguments as a list and empties it, so that inputs can be freed early."""
    if by_node:
        run = fx.Interpreter(gm).boxed_run
    else:

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return gm.forward(*given)

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True
    return call


def other(name: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile with another registered Dynamo backend."""
    return registered_backend(name)(gm, inputs)


def qualified_name(target: Any) -> str:
    """``k3::rms_norm`` for ops, else the function's or method's name."""
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))

"""Open every op before AOTAutograd: for training, for the plain baseline, for a compiler without k3 ops.

An op that is opened this early is ordinary torch to everything after it: autograd differentiates it, and a
mutating one becomes the same in-place torch calls its meaning makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import fx

from .kernels.op import OPS

_wanted: ContextVar[bool] = ContextVar("k3_open_ops", default=False)


@contextmanager
def open_ops() -> Iterator[None]:
    """Graphs that ``backend="k3"`` compiles inside hold no k3 op that has an open form.

    It acts when a graph is compiled, which is at the first call, not when it runs.
    """
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Whether this thread is inside :func:`open_ops`."""
    return _wanted.get()


def open_all(gm: fx.GraphModule) -> tuple[int, list[str]]:
    """Call the meaning of every k3 op of a Dynamo graph instead of the op.

    Returns how many were opened, and the ops that have no form that can be traced.
    """
    opened, closed = 0, []
    for node in list(gm.graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(
            target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
        ):
            continue
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        namespace, _, name = packet._qualified_op_name.partition("::")
        if namespace != "k3" or name not in OPS:
            continue
        if OPS[name].open_form is None:
            closed.append(name)
            continue
        node.target = OPS[name].open_form
        opened += 1
    gm.recompile()
    return opened, sorted(set(closed))


def without_gradient(gm: fx.GraphModule) -> str:
    """The k3 ops, still closed, that are given something that wants a gradient; torch would only warn."""
    lost = []
    for node in [n for n in gm.graph.nodes if n.op == "call_function"]:
        values = [given.meta.get("example_value") for given in node.all_input_nodes]
        if getattr(node.target, "_qualified_op_name", str(node.target)).startswith(("k3::", "k3.")) and any(
            isinstance(v, torch.Tensor) and v.requires_grad for v in values
        ):
            lost.append(str(node.target))
    return ", ".join(dict.fromkeys(lost))

"""Which nodes of a graph talk to other ranks, in torch's ops and in ours, and what each of ours sends."""

from __future__ import annotations

import torch
from k3compile.kernels.latent_tail_traffic import COLLECTIVES, Traffic
from k3compile.passes.graph import value
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

NAMESPACES = ("k3", "_c10d_functional", "_c10d_functional_autograd", "c10d")


def group_of(node: fx.Node) -> str:
    """The name of the process group over which ``node`` communicates by itself; "" where there is none."""
    target = overload_of(node)
    if target is None or target.namespace not in NAMESPACES:
        return ""
    given = arguments(node, target)
    group = given.get("group", given.get("group_name", ""))
    return group if isinstance(group, str) else ""


def traffic_of(node: fx.Node) -> tuple[Traffic, ...]:
    """What an op of ours sends to a group it names; nothing for other nodes and where sizes are unknown."""
    target = overload_of(node)
    declared = COLLECTIVES.get(str(target).removeprefix("k3.")) if target is not None else None
    if declared is None or not group_of(node):
        return ()
    given = arguments(node, target)
    args = [value(given[a.name]) for a in target._schema.arguments]
    return () if any(a is None for a in args) else declared(*args)


def overload_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op a node calls, functionalised or not, by its first overload where Dynamo leaves that open."""
    target = node.args[0] if node.target is auto_functionalized_v2 else node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target if isinstance(target, torch._ops.OpOverload) else None


def arguments(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, object]:
    """What a call gives, by name."""
    return dict(zip([a.name for a in target._schema.arguments], node.args)) | dict(node.kwargs)

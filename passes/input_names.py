"""What the user calls an input of a graph, at every level of it.

    Dynamo's source                  placeholder                  name
    L['p']                           l_p_          -> arg4_1      p
    L['step'].cu_other.size()[0]     u7            -> arg17_1     step.cu_other.0
    L['self']._modules['ffn']._parameters['weight']               self.ffn.weight

AOTAutograd calls inputs ``arg17_1`` but leaves on each which of Dynamo's it is; an input that a pass added
has its placeholder's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

META = "input_name"
STEPS = (
    (re.compile(r"^[LG]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]"), r".\1"),
    (re.compile(r"\.size\(\)\[(\d+)\]$"), r".\1"),
)


def names_of(gm: fx.GraphModule) -> list[str]:
    """A name for each placeholder of Dynamo's graph, in order."""
    return [plain(node) for node in gm.graph.find_nodes(op="placeholder")]


def plain(node: fx.Node) -> str:
    """The source of a placeholder without Dynamo's spelling; the node's name where it has none."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return node.name
    for pattern, replacement in STEPS:
        name = pattern.sub(replacement, name)
    return name


def carry(names: Sequence[str], gm: fx.GraphModule) -> None:
    """Note on the placeholders of a traced graph which of Dynamo's they are."""
    for node in gm.graph.find_nodes(op="placeholder"):
        index = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(index, int) and index < len(names):
            node.meta[META] = names[index]


def name_of(node: fx.Node) -> str | None:
    """What :func:`carry` noted, or the source itself; None for a node that is no input of the user's."""
    if node.op != "placeholder":
        return None
    if META in node.meta:
        return node.meta[META]
    return plain(node) if getattr(node, "_dynamo_source", None) is not None else None

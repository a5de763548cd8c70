"""Inputs that a pass adds to Dynamo's graph: tail placeholders the caller never sees.

    def forward(self, x, state):             def forward(self, x, state, export_offset):
        o = k3.op(x, state)            ->        o = k3.op_export(x, state, export_offset)

The front door appends a tensor for each to every call, found by ``key``. A tensor in the graph instead would
be one for all layers that share the graph. Sizes are fixed: a new symbol would need a source Dynamo knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, fx

if TYPE_CHECKING:
    from k3compile.passes.runner import Context


class ExtraInput(NamedTuple):
    """One added placeholder. key: who supplies it. example: a tensor of its dtype, size and device."""

    name: str
    key: str
    example: Tensor


def add_input(gm: fx.GraphModule, name: str, key: str, example: Tensor, ctx: Context) -> fx.Node:
    """Append a placeholder to a copy of Dynamo's graph and note it in ``ctx.extra_inputs``.

    Asked again for the same key it returns the placeholder that is there.
    """
    assert ctx.level == "dynamo", "AOTAutograd must see every input"
    for known in ctx.extra_inputs:
        if known.key == key:
            return next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == known.name)
    *_, last = gm.graph.find_nodes(op="placeholder") or [None]
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(last) if last is not None else gm.graph.inserting_before(first):
        node = gm.graph.placeholder(name)
    node._dynamo_source = None  # AOTAutograd asks every placeholder for it
    mode = ctx.fake_mode
    node.meta["example_value"] = mode.from_tensor(example, static_shapes=True) if mode else example
    ctx.extra_inputs.append(ExtraInput(node.name, key, example))
    return node

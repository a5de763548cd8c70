"""The graph that Dynamo hands to a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def graph_of(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The one graph Dynamo makes of ``fn(*args)``, sizes fixed."""
    graphs = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=keep, fullgraph=True, dynamic=False)(*args)
    return graphs[0]

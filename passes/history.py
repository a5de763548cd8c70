"""Snapshots of one graph in a row that say which node is which: exact, from the objects and FX's own hooks.

recorder(gm)   -> {..., "moment": "5f0c"}                          before a pass
recorder(gm)   -> {..., "moment": "91ab", "previous": "5f0c"}      after it; its nodes hold
                  "was": id of the same node object before, "replaces": ids that it was put in the place of
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from k3compile.passes.snapshot import snapshot
from k3compile.passes.symbol_names import SymbolNames
from torch import fx


class Recorder:
    """Called in turn before and after passes over the same graph module."""

    def __init__(self, level: str, symbols: SymbolNames | None = None) -> None:
        self.level = level
        self.symbols = symbols or SymbolNames()
        self.ids: dict[fx.Node, int] = {}
        self.moment: str | None = None
        self.replaced: dict[str, list[fx.Node]] = {}
        self.watched: fx.GraphModule | None = None

    def __call__(self, gm: fx.GraphModule) -> dict[str, Any]:
        """A snapshot of ``gm`` as it is now."""
        if self.watched is not None:
            self.watched._unregister_replace_node_hook(self.saw)
        data = snapshot(gm, self.level, self.symbols)
        previous, words = self.moment, json.dumps(data["nodes"], sort_keys=True).encode()
        self.moment = data["moment"] = hashlib.sha256(words).hexdigest()[:16]
        if previous is not None:
            data["previous"] = previous
            for node, one in zip(gm.graph.nodes, data["nodes"]):
                if node in self.ids:
                    one["was"] = self.ids[node]
                if olds := [self.ids[old] for old in self.replaced.get(node.name, ()) if old in self.ids]:
                    one["replaces"] = sorted(set(olds))
        self.ids = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.replaced = {}
        self.watched = None if self.watched is not None else gm
        if self.watched is not None:
            gm._register_replace_node_hook(self.saw)
        return data

    def saw(self, old: fx.Node, new: str, user: fx.Node) -> None:
        """FX tells that ``user`` reads the node called ``new`` in the place of ``old``."""
        self.replaced.setdefault(new, []).append(old)

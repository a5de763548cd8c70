"""What data decides in a context group: whose queries go to the context, and to whom the context comes.

k3.exchanged_rows(seen, cu, ...)      token rows whose queries go: a size of the graph, known for one mix
k3.mla_attend_gathered(...)           the others gather the context in stretches, a collective each
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..graphdiff.cost import nodes_in
from ..graphdiff.sizes import itemsize
from ..kernels.mla_gather import STRETCH, exchanged_rows
from .counts import op_of
from .mix import Mix

CHOICE, GATHERED = "k3.exchanged_rows", "k3.mla_attend_gathered"


class Contexts(NamedTuple):
    """One run of a graph. sizes: symbol -> rows that exchange. collectives: inside of the ops that gather.
    sent: bytes of their operands on one rank. ops, bound: what a price without a mix takes these two for.
    """

    sizes: Mapping[str, int]
    collectives: int = 0
    sent: int = 0
    ops: int = 0
    bound: int = 0


def contexts(snapshot: Mapping[str, Any], mix: Mix, dcp: int) -> Contexts:
    """What a graph of one layer does for ``mix``; nothing where it shares no context."""
    by_id = {node["id"]: node for node in snapshot["nodes"]}
    sizes: dict[str, int] = {}
    collectives = sent = exchanged = ops = bound = 0
    for node in by_id.values():
        sources = list(nodes_in(node["args"]))
        if sources and op_of(by_id[sources[0]]).startswith(CHOICE) and "sym" in (node["value"] or {}):
            sizes[node["value"]["sym"]] = exchanged = chosen(mix, *by_id[sources[0]]["args"][2:4])
        elif op_of(node).startswith(GATHERED):
            pages, together = by_id[node["args"][3]["node"]]["value"], node["args"][9]
            rows = stretches(mix.context, dcp, together) * mix.requests_after(exchanged)
            row = pages["shape"][2] * itemsize(pages["dtype"])
            ops, collectives = ops + 1, collectives + len(rows)
            sent, bound = sent + sum(rows) * row, bound + pages["shape"][1] * row * table_of(mix)
    return Contexts(sizes, collectives, sent, ops, bound)


def table_of(mix: Mix) -> int:
    """Entries of the page table."""
    sizes = mix.sizes(0)
    return sizes["step.pages.0"] * sizes["step.pages.1"]


def chosen(mix: Mix, query: int, token: int) -> int:
    """Rows whose queries had better go, for the bytes that a query and a token of context cost."""
    seen = torch.full((mix.requests,), mix.context)
    cu = torch.tensor([0, *accumulate(mix.lengths)])
    return int(exchanged_rows(seen, cu, query, token))


def stretches(context: int, dcp: int, together: int) -> list[int]:
    """Rows that a rank gives for each stretch of a context that comes."""
    turn = dcp * together
    step = max(1, STRETCH // turn) * turn
    return [-(-min(step, context - first) // turn) * together for first in range(0, context, step)]

"""A pass that found nothing to do says what it looked for, so that an empty block of a report is no riddle.

contiguous_views: 41 -> 41 nodes        contiguous_views: 41 -> 41 nodes
                                   ->     note: no read or write through an index tensor in this graph
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from k3compile.passes.remarks import PassRecord, Remark

LOOKS_FOR = {  # name of a pass -> what a graph without a site for it does not have
    "canonicalize": "view that changes nothing",
    "contiguous_views": "read or write through an index tensor (index_select, index_copy)",
    "fuse_norm": "sum or mix that a norm reads",
    "latent_tail": "top-k finalize (experts' rows gathered, weighted, summed)",
    "lower": "k3 op and no collective of one rank",
    "read_bf16": "product with a matrix that was widened from bfloat16",
    "state_export": "KDA prefill or convolution that can leave a checkpoint",
}


def explained(records: Iterable[PassRecord]) -> list[PassRecord]:
    """The same records, those without a remark with one note."""
    return [record if record.remarks else replace(record, remarks=(note(record.name),)) for record in records]


def note(name: str) -> Remark:
    """What pass ``name`` did not find."""
    wanted = LOOKS_FOR.get(name, "site for this pass")
    return Remark(name, "note", "", "", f"no {wanted} in this graph")


def nothing_for_us(records: Iterable[PassRecord]) -> bool:
    """Whether no k3 op was in the graph and no pass changed more than views that change nothing."""
    done = [r for record in records for r in record.remarks if record.name != "canonicalize"]
    return not any(r.kind == "applied" or (r.pass_name == "lower" and r.node) for r in done)

"""Let every KDA prefill of a graph, and its convolution, leave a checkpoint at a token inside a row.

    o = k3.kda_prefill(.., state, slots, cu)      o = k3.kda_prefill_export(.., state, slots, cu, off, slot)
    m = k3.short_conv(.., window, slots, cu)  ->  m = k3.short_conv_export(.., window, slots, cu, off, slot)
    r = k3.kda_scan(.., initial)                  r = k3.kda_scan_export(.., initial, off, pool, 0)

Offset and slot are added inputs of one fixed length, the same for all layers of a call; the checkpoint goes
to a slot of the layer's own pool, which the call has already, so one graph serves every layer and offset.
Ops without slots export to row ``site`` of a pool that belongs to the call. An op takes part by having a
twin named ``_export`` with the added arguments of one of the two forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from k3compile.kernels.op import NAMESPACE, OPS, Op
from k3compile.passes.extra_inputs import add_input
from k3compile.passes.graph import emit, tensor, value
from k3compile.passes.remarks import PassResult, Remark
from k3compile.passes.runner import Context
from k3compile.passes.source import location
from torch import fx

NAME = "state_export"
STOPPED = "stopped by fuel or by the bisector"
OFFSET, SLOT, SEQUENCE_OFFSET = "export_offset", "export_slot", "export_sequence_offset"  # keys of inputs
POOL = "export_pool:"  # key of an input, followed by the op's name
SLOTS_FORM, POOL_FORM = {"export_offset", "export_slot"}, {"export_offset", "pool", "site"}


@dataclass
class Site:
    """One call of an op that has an export twin, and what becomes of it."""

    node: fx.Node
    op: Op
    twin: Op
    named: dict[str, Any]
    refusal: str | None = None
    detail: str = ""
    expected: dict[str, int | str] = field(default_factory=dict)

    @property
    def kept(self) -> Any:
        """The node of what a checkpoint is a row of: the pool with slots, or the initial states."""
        return self.named[self.op.writes[0] if self.op.writes else "initial"]

    def remark(self) -> Remark:
        reason = self.refusal or "leaves a checkpoint where the call asks for one"
        kind, op = ("missed" if self.refusal else "applied"), f"{NAMESPACE}.{self.op.name}"
        place = location(self.node)
        source = str(place) if place else None
        return Remark(NAME, kind, self.node.name, op, reason, self.detail, source, expected=self.expected)


class StateExport:
    """The pass. Its remarks: one per call of an op with an export twin."""

    name, level, keeps = NAME, "dynamo", "exact"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Refuse or take every site first: the pools are as long as there are sites taken."""
        sites = [site for node in gm.graph.nodes if (site := site_of(node)) is not None]
        first: dict[str, Site] = {}
        for site in sites:
            site.refusal = objection(site, first)
            if site.refusal is None and not ctx.may_rewrite(NAME):
                site.refusal = STOPPED
        taken = [site for site in sites if site.refusal is None]
        remarks = tuple(self.rewrite(site, taken, gm, ctx) for site in sites)
        return PassResult(bool(taken), remarks)

    def rewrite(self, site: Site, taken: list[Site], gm: fx.GraphModule, ctx: Context) -> Remark:
        """Put the twin in the place of a site that was taken."""
        if site.refusal is not None:
            return site.remark()
        kept, row = tensor(site.kept), bytes_of_row(site)
        if has_slots(site):
            for name, key in (("export_offset", OFFSET), ("export_slot", SLOT)):
                zeros = torch.zeros(ctx.export_rows, dtype=torch.int32, device=kept.device)
                site.named[name] = add_input(gm, name, key, zeros, ctx)
            site.detail = "to a slot of the pool that the call is given"
        else:
            family = [one for one in taken if one.op is site.op]
            zeros = torch.zeros(kept.shape[0], dtype=torch.int32, device=kept.device)
            pool = torch.zeros(len(family), *kept.shape, dtype=kept.dtype, device=kept.device)
            name = f"export_pool_{site.op.name}"
            site.named["export_offset"] = add_input(gm, "sequence_offset", SEQUENCE_OFFSET, zeros, ctx)
            site.named["pool"] = add_input(gm, name, POOL + site.op.name, pool, ctx)
            site.named["site"] = family.index(site)
            site.detail = f"to row {site.named['site']} of an added pool {list(pool.shape)}"
        site.expected = {"launches": 0} | ({"bytes": f"{2 * row} * exported_rows"} if row else {})
        remark = site.remark()
        replace(site)
        return remark


STATE_EXPORT = StateExport()


def site_of(node: fx.Node) -> Site | None:
    """The site at ``node``, called by packet or by overload; None where no twin of a known form exists."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet, default = target.overloadpacket, target._overloadname == "default"
    else:
        packet, default = target, True
    if node.op != "call_function" or not isinstance(packet, torch._ops.OpOverloadPacket) or not default:
        return None
    namespace, _, name = packet._qualified_op_name.partition("::")
    op, twin = (OPS.get(name), OPS.get(f"{name}_export")) if namespace == NAMESPACE else (None, None)
    if op is None or twin is None or added(op, twin) not in (SLOTS_FORM, POOL_FORM):
        return None
    return Site(node, op, twin, given(node, op))


def given(node: fx.Node, op: Op) -> dict[str, Any]:
    """The arguments of a call, by name."""
    names = [argument.name for argument in op.overload._schema.arguments]
    return {**dict(zip(names, node.args)), **node.kwargs}


def added(op: Op, twin: Op) -> set[str]:
    """The arguments a twin has beyond its op's."""
    own, theirs = ({a.name for a in o.overload._schema.arguments} for o in (op, twin))
    return theirs - own if own <= theirs else set()


def has_slots(site: Site) -> bool:
    return "export_slot" in added(site.op, site.twin)


def objection(site: Site, first: dict[str, Site]) -> str | None:
    """Why a site cannot share the inputs of the sites before it; ``first`` holds one of each form and op."""
    kept = tensor(site.kept)
    if kept is None:
        return "the state has no known shape"
    form = first.setdefault("slots" if has_slots(site) else "sequences", site)
    device = tensor(form.kept).device
    if kept.device != device:
        return f"the state is on {kept.device}, that of {form.node.name} on {device}: they share the offsets"
    if has_slots(site):
        return None
    if not all(isinstance(size, int) for size in kept.shape):
        return f"the state {list(kept.shape)} has no fixed size, and an added input must have one"
    if kept.shape[0] != tensor(form.kept).shape[0]:
        count = tensor(form.kept).shape[0]
        return f"{kept.shape[0]} sequences, {form.node.name} has {count}: they share the offsets"
    family = tensor(first.setdefault(site.op.name, site).kept)
    if (kept.shape, kept.dtype) != (family.shape, family.dtype):
        other = first[site.op.name].node.name
        return f"the state is {look(kept)}, that of {other} {look(family)}: they share a pool"
    return None


def look(found: torch.Tensor) -> str:
    return f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"


def bytes_of_row(site: Site) -> int | None:
    """Bytes of one checkpoint, where its sizes are numbers."""
    kept = tensor(site.kept)
    fixed = all(isinstance(size, int) for size in kept.shape[1:])
    return kept.element_size() * math.prod(kept.shape[1:]) if fixed else None


def replace(site: Site) -> None:
    """The twin's call, by packet or overload as the op's was, with the value the op had."""
    node, op = site.node, site.twin.overload
    target = op if isinstance(node.target, torch._ops.OpOverload) else op.overloadpacket
    named = site.named | given(node, site.op)  # read again: an earlier site may have made an argument
    args = tuple(named[argument.name] for argument in op._schema.arguments)
    with node.graph.inserting_before(node):
        new = emit(node.graph, target, args, like=node, mode=None, known=value(node))
    new.meta["example_value"] = new.meta.pop("val")
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)

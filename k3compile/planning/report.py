"""A plan as plain values: what `k3 plan --json` prints and what the text is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..runtime.cache.sizing import CHUNK, PoolSizes, unit_of
from ..runtime.engine_config import EngineConfig
from .bounds import bounds
from .capacity import capacities
from .change import Change
from .collectives import exchanged
from .plan import Plan
from .weights import weigh


def as_values(plan: Plan, changes: list[Change], name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """All of it. name: of the model, as it was asked for. changes: for a plan that does not fit. given: flags
    that the command to serve with repeats as they are.
    """
    q, gpu = plan.question, plan.question.gpu
    values: dict[str, Any] = {
        "model": name,
        "gpu": gpu._asdict(),
        "tp": q.tp,
        "dcp": q.dcp,
        "nodes": q.nodes,
        "dtype": q.dtype,
        "draft": q.draft is not None,
        "fits": plan.fits,
        "misfits": list(plan.misfits),
        "memory": memory(plan),
        "weights": weights(plan),
        "budget": budget(
            plan.engine, plan.needed_context if plan.sizes is None else plan.sizes.max_model_len
        ),
        "collectives": exchanged(q.config, q.itemsize, q.dcp)._asdict(),
        "changes": [changed(change) for change in changes],
    }
    if plan.sizes is not None:
        values["pools"] = pools(plan.sizes)
        values["block"] = block(plan.engine, plan.sizes)
        values["bounds"] = bounds(plan)._asdict()
    if plan.fits:
        values["requests"] = [one._asdict() for one in capacities(plan)]
        values["serve"] = serve_command(plan, given)
    return values


def memory(plan: Plan) -> dict[str, Any]:
    """Bytes of a rank, by who has them."""
    taken = plan.sizes.total_bytes if plan.sizes is not None else 0
    return {
        "usable_share": plan.question.usable,
        "usable": plan.memory,
        "weights": plan.weight_bytes,
        "reserve": plan.reserve._asdict() | {"total": plan.reserve.total},
        "room": plan.room,
        "pools": taken,
        "free": plan.room - taken,
    }


def weights(plan: Plan) -> list[dict[str, Any]]:
    """By kind. copies: how often all ranks together hold it: 1 if it is dealt out, tp if each has all."""
    q = plan.question
    if not plan.weights:
        return []
    whole = weigh(q.config, q.draft, 1, q.dtype)
    return [
        {"kind": kind, "rank": size, "whole": whole[kind], "copies": round(size * q.tp / whole[kind], 3)}
        for kind, size in plan.weights.items()
    ]


def budget(engine: EngineConfig, longest: int) -> dict[str, Any]:
    """What a step may hold."""
    limits = engine.limits(longest)
    return {
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "num_drafts": engine.num_drafts,
        "adaptive_budget": engine.adaptive_budget,
        "step_budget": limits.step_budget,
        "row_charge": limits.row_charge,
        "alone": limits.step_budget - limits.row_charge,
        "full": limits.step_budget - engine.max_num_seqs * limits.row_charge,
        "draft_rows": limits.draft.lookahead,
        "draft_limit": engine.draft_limit or engine.max_num_batched_tokens,
        "max_active": limits.max_active,
    }


def pools(sizes: PoolSizes) -> dict[str, Any]:
    """What the pools hold; numbers include the null slot and page."""
    return {
        "slots": sizes.num_slots,
        "slots_per_request": sizes.slots_per_request,
        "record_slots": sizes.record_slots,
        "checkpoints": sizes.num_checkpoints,
        "pages": sizes.num_pages,
        "page_size": sizes.page_size,
        "tokens": sizes.tokens,
        "max_model_len": sizes.max_model_len,
        "slot_bytes": sizes.bytes.slot,
        "record_bytes": sizes.bytes.records,
        "page_bytes": sizes.bytes.page,
        "bytes": sizes.total_bytes,
    }


def block(engine: EngineConfig, sizes: PoolSizes) -> dict[str, Any]:
    """Where states of prefixes lie. padding: by how much a block's latents exceed a state, in one layer."""
    token = sizes.bytes.layer_page / sizes.page_size
    size, state = sizes.block_size, sizes.bytes.layer_slot
    return {
        "tokens": size,
        "unit": unit_of(engine, size) if size else 0,
        "alignment": CHUNK,
        "state_bytes": state,
        "token_bytes": token,
        "padding": size * token / state - 1 if size and state else 0.0,
    }


def changed(change: Change) -> dict[str, Any]:
    """A change and what it brings."""
    sizes = change.plan.sizes
    assert sizes is not None
    found = {"settings": change.settings, "nodes": change.plan.question.nodes, "tokens": sizes.tokens}
    return found | {"max_model_len": sizes.max_model_len, "pools": sizes.total_bytes}


# fmt: off
REPEATED = (  # of what was asked
    "page_size", "max_model_len", "draft_limit", "block_size", "prefix_match_unit", "retention_interval",
    "num_checkpoints",
)
# fmt: on


def serve_command(plan: Plan, given: Mapping[str, str]) -> list[str]:
    """What serves with these sizes, in pieces. given: further flags, the model's folder among them."""
    q, engine = plan.question, plan.engine
    flags: dict[str, Any] = {"model": "DIR", "tp": q.tp, "dcp": q.dcp, "device": "cuda", "dtype": q.dtype}
    names = ("num_drafts", "max_num_seqs", "max_num_batched_tokens", "num_pages", "kv_cache_bytes", *REPEATED)
    plain = {field.name: field.default for field in fields(EngineConfig)}
    for name in names:
        asked = getattr(q.engine, name) if name in REPEATED else getattr(engine, name)
        if asked != plain[name] or name == "num_drafts":  # serve has a default of its own for some models
            flags[name] = asked
    flags |= given
    said = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    said += [] if engine.prefix_cache else ["--no-prefix-cache"]
    if q.tp == 1:
        return ["k3 serve", *said]
    across = "--standalone"
    if q.nodes > 1:
        across = f"--nnodes {q.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    return ["torchrun", across, f"--nproc-per-node {q.tp // q.nodes}", "examples/serve.py", *said]

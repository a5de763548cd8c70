"""Steps built by hand, thin configurations of every layer kind, and filled models, for tests.

``tests/conftest.py`` puts this folder on the path: ``from small_models import Row, make_step, small_model``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from k3compile.runtime.step import Step


class Row(NamedTuple):
    """One request in a step. ``pages`` must hold ``seen + len(tokens)`` tokens.

    scratch: of a verify row of a model without state replay, the slots that receive its states.
    """

    tokens: Sequence[int]
    slot: int
    seen: int = 0
    pages: Sequence[int] = (0,)
    verify: bool = False
    scratch: Sequence[int] = ()


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows as a step holds them: verify, then single tokens, then longer ones, stable inside each."""
    verify = [r for r in rows if r.verify]
    decode = [r for r in rows if not r.verify and len(r.tokens) == 1]
    return [*verify, *decode, *(r for r in rows if not r.verify and len(r.tokens) != 1)]


def make_step(rows: Sequence[Row], max_requests: int = 8, drafts: int = 3) -> Step:
    """Rows in any order -> a Step in the order of ``ordered``."""
    rows = ordered(rows)
    verify = [len(r.tokens) for r in rows if r.verify]
    other = [len(r.tokens) for r in rows if not r.verify]
    columns = max((len(r.pages) for r in rows), default=1)
    table = [[*r.pages, *[0] * (columns - len(r.pages))] for r in rows]
    return Step(
        tokens=ints([t for r in rows for t in r.tokens]),
        spans=ints([sum(verify), other.count(1), sum(n for n in other if n != 1)]),
        cu_verify=ints([0, *accumulate(verify)]),
        cu_other=ints([0, *accumulate(other)]),
        slots=ints([r.slot for r in rows]),
        seen=ints([r.seen for r in rows]),
        pages=ints([p for line in table for p in line]).view(len(rows), columns),
        scratch=scratch_of([r for r in rows if r.verify], drafts + 1),
        anchor=torch.ones(len(verify), dtype=torch.int64),
        export_offset=torch.zeros(max_requests, dtype=torch.int32),
        export_slot=torch.zeros(max_requests, dtype=torch.int32),
    )


def scratch_of(rows: Sequence[Row], width: int) -> torch.Tensor:
    table = [[*r.scratch, *[0] * (width - len(r.scratch))] for r in rows]
    return ints([slot for line in table for slot in line]).view(len(rows), width)


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def rows_of_hidden(rows: Sequence[Row], hidden: torch.Tensor) -> dict[int, torch.Tensor]:
    """Slot -> the rows of ``hidden`` that belong to it."""
    parts = hidden.split([len(r.tokens) for r in ordered(rows)])
    return {r.slot: part for r, part in zip(ordered(rows), parts)}


SMALL = K3Config(
    family="kimi_k3",
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=14,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-5,
    max_position_embeddings=4096,
    bos_token_id=90,
    eos_token_ids=(91,),
    pad_token_id=92,
    tie_word_embeddings=False,
    dtype="bfloat16",
    attn_res_block_size=12,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=4,
    v_head_dim=8,
    mla_use_output_gate=True,
    kda_layers=(0, 1, 2, 4, 5, 6, 8, 9, 10, 12),
    kda_num_heads=3,
    kda_head_dim=8,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_experts=8,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=64,
    moe_renormalize=True,
    routed_scaling_factor=1.0,
    experts_packed=True,
)  # fourteen layers of all four kinds and two snapshots; the widths all differ

SMALL_LINEAR = dataclasses.replace(
    SMALL,
    family="kimi_linear",
    num_hidden_layers=5,
    kda_layers=(0, 1, 2),
    attn_res_block_size=0,
    situ_beta=0.0,
    situ_linear_beta=0.0,
    q_lora_rank=0,
    mla_use_output_gate=False,
    gate_lower_bound=0.0,
    use_full_rank_gate=False,
    routed_expert_hidden_size=0,
    num_shared_experts=1,
    routed_scaling_factor=2.446,
    experts_packed=False,
)


def dealt(ranks: int, **more: object) -> K3Config:
    """A small model of all kinds of layer that ``ranks`` can share. more: fields of its own."""
    shared = {"num_attention_heads": ranks, "kda_num_heads": ranks, "moe_intermediate_size": 32 * ranks}
    depth = {"num_hidden_layers": 5, "kda_layers": (0, 1, 2, 4), "attn_res_block_size": 2}
    return dataclasses.replace(SMALL, **{**depth, **shared, **more})


def small_model(
    config: K3Config = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0, **more: object
) -> Model:
    """A filled model: activations stay near 1, and choices differ between tokens. more: for ``Model``."""
    model = Model(config, dtype, **more)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            low, high = (118, 125) if name.endswith("_scale") else (0, 256)
            parameter.copy_(torch.randint(low, high, parameter.shape, generator=generator))
        else:
            scale, shift = spread(name, parameter.shape[-1])
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * scale + shift)
    return model


def spread(name: str, inputs: int) -> tuple[float, float]:
    """Standard deviation and mean of a parameter."""
    leaf = name.split(".")[-1]
    known = {
        "a_log": (0.3, 0.0),
        "dt_bias": (1.0, -3.0),
        "e_score_correction_bias": (0.05, 0.0),
        "conv_weight": (0.5, 0.0),
        "embed_tokens": (1.0, 0.0),
    }
    if leaf in known:
        return known[leaf]
    return (0.1, 1.0) if "norm" in ".".join(name.split(".")[-2:]) else (inputs**-0.5, 0.0)

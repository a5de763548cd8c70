"""Which part of each parameter a rank holds: the one table, and what it cannot divide.

    Shard(0, HEAD)             Shard(1, HEAD)           Shard(0, HEAD, blocks=3)
    rank 0 | rows of its       r r r | columns of       q: rank 0 | rank 1 ..      of each block
    rank 1 | heads             0 1 2 | its heads        k: rank 0 | rank 1 ..      the same heads
    ...                              | -> a sum         v: rank 0 | rank 1 ..

A parameter cut by rows gives a rank its own outputs; one cut by columns gives a partial sum, and the layer
adds it up over the ranks. What every rank needs whole, and what is small, is replicated. Cut are *units*, so
that no head and no group of numbers with one scale is torn apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..config import GROUP, K3Config
from ..speculate.dspark_config import DSparkConfig
from .ranks import Ranks

VOCAB, HEAD, DENSE, SHARED, EXPERT = "token", "head", "dense column", "shared column", "expert column"
MOST_RANKS = 128  # that a suggestion looks at


@dataclass(frozen=True)
class Shard:
    """Dealt out along ``dim`` in equal runs of ``unit``, rank 0's first; of each of ``blocks`` such runs."""

    dim: int
    unit: str
    blocks: int = 1


@dataclass(frozen=True)
class Replicate:
    """Whole on every rank."""


Split = Shard | Replicate
WHOLE = Replicate()
ROWS, COLUMNS = Shard(0, HEAD), Shard(1, HEAD)

# fmt: off
TARGET: dict[str, Split] = {  # parameters of Model; * is the number of a layer
    "embed_tokens":                                         Shard(0, VOCAB),
    "lm_head.weight":                                       Shard(0, VOCAB),
    # KDA: q, k and v lie one after the other
    "layers.*.self_attn.qkv_proj.weight":                   Shard(0, HEAD, blocks=3),
    "layers.*.self_attn.conv_weight":                       Shard(0, HEAD, blocks=3),
    "layers.*.self_attn.b_proj.weight":                     ROWS,
    "layers.*.self_attn.f_a_proj.weight":                   WHOLE,  # a bottleneck that all heads read
    "layers.*.self_attn.f_b_proj.weight":                   ROWS,
    "layers.*.self_attn.a_log":                             ROWS,
    "layers.*.self_attn.dt_bias":                           ROWS,
    "layers.*.self_attn.o_norm":                            WHOLE,  # one gain for all heads
    "layers.*.self_attn.g_proj.0.weight":                   WHOLE,  # Kimi-Linear: the gate's bottleneck
    "layers.*.self_attn.g_proj.1.weight":                   ROWS,
    # KDA and MLA
    "layers.*.self_attn.g_proj.weight":                     ROWS,
    "layers.*.self_attn.o_proj.weight":                     COLUMNS,
    # MLA: the latents, and what makes them, are the same for all heads
    "layers.*.self_attn.q_proj.0.weight":                   WHOLE,
    "layers.*.self_attn.q_proj.1.weight":                   WHOLE,
    "layers.*.self_attn.q_proj.2.weight":                   ROWS,
    "layers.*.self_attn.q_proj.weight":                     ROWS,   # Kimi-Linear: a query of full rank
    "layers.*.self_attn.kv_a_proj_with_mqa.weight":         WHOLE,
    "layers.*.self_attn.kv_a_layernorm.weight":             WHOLE,
    "layers.*.self_attn.kv_b_proj.weight":                  ROWS,
    # router and latent projections: all ranks choose the same experts
    "layers.*.ffn.gate":                                    WHOLE,
    "layers.*.ffn.e_score_correction_bias":                 WHOLE,
    "layers.*.ffn.routed_expert_down_proj.weight":          WHOLE,
    "layers.*.ffn.routed_expert_norm.weight":               WHOLE,
    "layers.*.ffn.routed_expert_up_proj.weight":            WHOLE,  # some tails read a part of it
    # experts, shared experts, dense layers: inner columns
    "layers.*.ffn.experts.w1":                              Shard(1, EXPERT),
    "layers.*.ffn.experts.w1_scale":                        Shard(1, EXPERT),
    "layers.*.ffn.experts.w3":                              Shard(1, EXPERT),
    "layers.*.ffn.experts.w3_scale":                        Shard(1, EXPERT),
    "layers.*.ffn.experts.w2":                              Shard(2, EXPERT),
    "layers.*.ffn.experts.w2_scale":                        Shard(2, EXPERT),
    "layers.*.ffn.shared_experts.gate_proj.weight":         Shard(0, SHARED),
    "layers.*.ffn.shared_experts.up_proj.weight":           Shard(0, SHARED),
    "layers.*.ffn.shared_experts.down_proj.weight":         Shard(1, SHARED),
    "layers.*.ffn.gate_proj.weight":                        Shard(0, DENSE),
    "layers.*.ffn.up_proj.weight":                          Shard(0, DENSE),
    "layers.*.ffn.down_proj.weight":                        Shard(1, DENSE),
    # depth mixes and layer norms
    "layers.*.self_attention_res.norm":                     WHOLE,
    "layers.*.self_attention_res.proj":                     WHOLE,
    "layers.*.mlp_res.norm":                                WHOLE,
    "layers.*.mlp_res.proj":                                WHOLE,
    "output_attn_res.norm":                                 WHOLE,
    "output_attn_res.proj":                                 WHOLE,
    "layers.*.input_layernorm.weight":                      WHOLE,
    "layers.*.post_attention_layernorm.weight":             WHOLE,
    "norm.weight":                                          WHOLE,
}
DRAFT: dict[str, Split] = {  # parameters of DSparkModel; embedding and head are the target's
    "context_proj.weight":                                  WHOLE,  # every rank keeps all context latents
    "context_norm.weight":                                  WHOLE,
    "kv_a_proj":                                            WHOLE,
    "kv_a_layernorm":                                       WHOLE,
    "layers.*.self_attn.q_a_proj.weight":                   WHOLE,
    "layers.*.self_attn.q_a_layernorm.weight":              WHOLE,
    "layers.*.self_attn.q_b_proj.weight":                   ROWS,
    "layers.*.self_attn.kv_b_proj.weight":                  ROWS,
    "layers.*.self_attn.o_proj.weight":                     COLUMNS,
    "layers.*.mlp.gate_proj.weight":                        Shard(0, DENSE),
    "layers.*.mlp.up_proj.weight":                          Shard(0, DENSE),
    "layers.*.mlp.down_proj.weight":                        Shard(1, DENSE),
    "layers.*.input_layernorm.weight":                      WHOLE,
    "layers.*.post_attention_layernorm.weight":             WHOLE,
    "final_norm.weight":                                    WHOLE,
    "markov_w1":                                            WHOLE,  # a gather a drafted token would cost more
    "markov_w2":                                            WHOLE,
    "confidence_weight":                                    WHOLE,
    "confidence_bias":                                      WHOLE,
}
# fmt: on


def split_of(table: dict[str, Split], parameter: str) -> Split:
    """The row of ``table`` (TARGET or DRAFT) for a parameter."""
    return table[re.sub(r"^layers\.\d+\.", "layers.*.", parameter)]


def part_of(full: Tensor, split: Split, ranks: Ranks) -> Tensor:
    """What a rank holds of a whole parameter, as a view where that is possible."""
    if isinstance(split, Replicate) or ranks.size == 1:
        return full
    runs = full.unflatten(split.dim, (split.blocks, ranks.size, -1))
    return runs.select(split.dim + 1, ranks.rank).flatten(split.dim, split.dim + 1)


def objections(
    config: K3Config, tp: int, dcp: int = 1, page_size: int | None = None, draft: DSparkConfig | None = None
) -> list[str]:
    """Why ``tp`` ranks, in context groups of ``dcp``, cannot share a model and its draft; empty if they can.

    page_size: tokens of a page, which the ranks of a context group divide. All reasons, not the first.
    """
    if tp < 1 or dcp < 1:
        return [f"tp is {tp} and dcp is {dcp}: both must be at least 1"]
    found = refused(units(config), tp) + (draft_objections(draft, tp) if draft is not None else [])
    if tp % dcp:
        fit = ", ".join(str(n) for n in range(1, tp + 1) if tp % n == 0)
        found.append(f"dcp is {dcp}, and must divide tp {tp}: {fit}")
    if page_size is not None and page_size % dcp:
        found.append(f"page_size is {page_size}, and must be a multiple of dcp {dcp}")
    return found


def draft_objections(draft: DSparkConfig, tp: int) -> list[str]:
    """Why ``tp`` ranks cannot share a draft."""
    return refused(draft_units(draft), tp)


class Dealt(NamedTuple):
    """A number of a configuration that ranks divide: ``given`` in units of ``size``."""

    unit: str
    field: str
    given: int
    size: int = 1


def refused(dealt: Iterable[Dealt], tp: int) -> list[str]:
    """A sentence for each number that ``tp`` ranks cannot divide."""
    return [
        f"{one.field} is {one.given}, and {tp} ranks need a multiple of {tp * one.size}"
        + (f": {one.size} inputs of w2 share one MXFP4 scale" if one.size > 1 else "")
        for one in dealt
        if one.given % (tp * one.size)
    ]


def units(config: K3Config) -> Iterator[Dealt]:
    """All that the ranks of a target divide."""
    layers = range(config.num_hidden_layers)
    yield Dealt(VOCAB, "vocab_size", config.vocab_size)
    if not all(map(config.is_kda, layers)):
        yield Dealt(HEAD, "num_attention_heads", config.num_attention_heads)
    if any(map(config.is_kda, layers)):
        yield Dealt(HEAD, "kda_num_heads", config.kda_num_heads)
    if not all(map(config.is_moe, layers)):
        yield Dealt(DENSE, "intermediate_size", config.intermediate_size)
    if any(map(config.is_moe, layers)):
        inner, group = config.moe_intermediate_size, GROUP if config.experts_packed else 1
        yield Dealt(EXPERT, "moe_intermediate_size", inner, group)
        both = "num_shared_experts * moe_intermediate_size"
        yield Dealt(SHARED, both, config.shared_intermediate_size)


def draft_units(draft: DSparkConfig) -> Iterator[Dealt]:
    """All that the ranks of a draft divide."""
    yield Dealt(HEAD, "the draft's num_attention_heads", draft.num_attention_heads)
    yield Dealt(DENSE, "the draft's intermediate_size", draft.intermediate_size)


def check(
    config: K3Config, tp: int, dcp: int = 1, page_size: int | None = None, draft: DSparkConfig | None = None
) -> None:
    """Raise ValueError listing all objections and the numbers of ranks that would do."""
    found = objections(config, tp, dcp, page_size, draft)
    if found:
        fit = [n for n in range(1, MOST_RANKS + 1) if not objections(config, n, draft=draft)]
        allowed = f"of up to {MOST_RANKS} ranks, these numbers can share it: {', '.join(map(str, fit))}"
        raise ValueError("\n  ".join([f"{tp} ranks cannot share this model:", *found, allowed]))

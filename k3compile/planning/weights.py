"""Bytes of a rank's weights by kind: the model itself, made on the meta device, where nothing is allocated.

    Model(config, device="meta", ranks=Ranks(0, n, ""))      parameters of this rank's shapes, and no memory
    self_attn.qkv_proj.weight  ->  "KDA projections"         every parameter is of exactly one kind

What a server loads is the same class with the same ranks, so that a plan cannot be of another size.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

import torch
from torch import nn

from ..runtime.config import K3Config
from ..runtime.model import Model
from ..runtime.parallel.ranks import Ranks
from ..runtime.speculate.dspark_config import DSparkConfig
from ..runtime.speculate.dspark_model import DSparkModel

EXPERTS = "routed experts"
EMBEDDING = "embedding"
DRAFT = "draft"
KINDS = (  # in the order of a report; the first pattern that a parameter's name holds decides
    (EMBEDDING, r"^embed_tokens"),
    ("output head", r"^lm_head"),
    ("KDA", r"^layers\.\d+\.self_attn\.(kda)\."),
    ("MLA", r"^layers\.\d+\.self_attn\.(mla)\."),
    (EXPERTS, r"^layers\.\d+\.ffn\.experts\."),
    ("shared experts", r"^layers\.\d+\.ffn\.shared_experts\."),
    ("latent projections", r"^layers\.\d+\.ffn\.routed_expert_"),
    ("router", r"^layers\.\d+\.ffn\.(gate$|e_score_correction_bias$)"),
    ("dense MLP", r"^layers\.\d+\.ffn\.(gate|up|down)_proj\."),
    ("norms and depth mixes", r"(^|\.)(norm|input_layernorm|post_attention_layernorm|\w+_res)\."),
)


def make_model(
    config: K3Config, ranks: Ranks, dtype: str, state_replay: bool = True, taps: tuple[int, ...] = ()
) -> Model:
    """One rank's part without memory, in ``dtype`` throughout."""
    return Model(config, getattr(torch, dtype), "meta", None, taps, state_replay, ranks)


def make_draft(config: DSparkConfig, ranks: Ranks, dtype: str) -> DSparkModel:
    """The same of a draft."""
    return DSparkModel(config, getattr(torch, dtype), "meta", None, ranks)


def bytes_by_kind(model: Model) -> dict[str, int]:
    """Bytes of a model's parameters by kind, in the order of KINDS; kinds it does not have are left out."""
    config, found = model.config, Counter()
    for name, parameter in model.named_parameters():
        found[kind_of(config, name)] += parameter.numel() * parameter.element_size()
    return {kind: found[kind] for kind, _ in KINDS if kind in found}


def kind_of(config: K3Config, name: str) -> str:
    """The kind of one parameter of a Model."""
    layer = re.match(r"layers\.(\d+)\.self_attn\.", name)
    if layer:
        which = "kda" if config.is_kda(int(layer[1])) else "mla"
        name = name.replace(".self_attn.", f".self_attn.{which}.", 1)
    kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), None)
    assert kind is not None, f"no kind for the parameter {name}"
    return kind


def total_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@lru_cache(maxsize=64)
def weigh(config: K3Config, draft: DSparkConfig | None, size: int, dtype: str) -> dict[str, int]:
    """Bytes by kind of one of ``size`` ranks, the draft's at the end. Do not change what it returns."""
    ranks = Ranks(0, size, "")
    kinds = bytes_by_kind(make_model(config, ranks, dtype))
    if draft is not None:
        kinds[DRAFT] = total_bytes(make_draft(draft, ranks, dtype))
    return kinds

"""What the GPU's figures allow at most: bounds, not predictions. A real step takes longer for many reasons.

one token     every weight that it meets is read once, its state is read and written
a prompt      two operations for each weight that a token meets, on all ranks together
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ..runtime.config import K3Config
from ..runtime.parallel.ranks import Ranks
from .plan import Plan
from .weights import DRAFT, EMBEDDING, EXPERTS, make_model


class Bounds(NamedTuple):
    """token_bytes: that a rank reads and writes for one token alone; token_seconds: that this takes at least.
    prompt_rate: tokens a second at most, of all ranks. parameters: that one token meets.
    """

    token_bytes: int
    token_seconds: float
    prompt_rate: float
    parameters: int


def bounds(plan: Plan) -> Bounds:
    """Of a plan that has pools."""
    assert plan.sizes is not None
    q, weights = plan.question, plan.weights
    share = q.config.num_experts_per_token / q.config.num_experts
    read = sum(size for kind, size in weights.items() if kind not in (EMBEDDING, EXPERTS, DRAFT))
    token = int(read + weights.get(EXPERTS, 0) * share) + 2 * plan.sizes.bytes.slot
    met = parameters_met(q.config)
    return Bounds(token, token / q.gpu.bandwidth, q.tp * q.gpu.flops / (2 * met), met)


@lru_cache(maxsize=8)
def parameters_met(config: K3Config) -> int:
    """Parameters that one token is multiplied with: all but the embedding and experts it does not go to."""
    found = 0
    for name, parameter in make_model(config, Ranks(0, 1, ""), "bfloat16").named_parameters():
        numbers = parameter.numel()
        if (name == "embed_tokens" and not config.tie_word_embeddings) or name.endswith("_scale"):
            continue
        if re.search(r"\.ffn\.experts\.", name):
            numbers = numbers * (2 if config.experts_packed else 1)  # a byte holds two
            numbers = numbers * config.num_experts_per_token // config.num_experts
        found += numbers
    return found

"""What the ranks exchange in one step of the target: how many collectives, and their bytes a row.

    embedding        1 all-reduce   [T, D]         rows of the vocabulary are dealt out
    each attention   1 all-reduce   [T, D]         heads are
    dense layer      1 all-reduce   [T, D]         inner columns are
    MoE layer        2 all-reduces  [T, L] [T, D]  routed in the latent, and shared
    logits           1 all-gather   [N, V]         N rows that are asked for

In context groups an MLA layer has an all-gather of queries and an all-to-all of what they found besides, and
more where a long prompt has context, which then comes in stretches.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.config import K3Config


class Exchanged(NamedTuple):
    """Of one step. ``row_bytes``: payload of all-reduces for each token row; ``asked_bytes``: of the gather
    for each row whose logits are asked for. all_to_alls: of context groups, 0 without.
    """

    all_reduces: int
    all_gathers: int
    all_to_alls: int
    row_bytes: int
    asked_bytes: int


def exchanged(config: K3Config, itemsize: int, context: int = 1) -> Exchanged:
    """Collectives of a step of the model as it is written; one rank alone counts them too.

    itemsize: bytes of an activation. context: ranks of a context group. A fused latent tail may exchange in
    other calls, see ``k3 dry-run``.
    """
    layers = config.num_hidden_layers
    moe = sum(map(config.is_moe, range(layers)))
    wide = 1 + layers + layers  # embedding, attentions, one a feed-forward
    row = wide * config.hidden_size + moe * config.latent_size
    dealt = layers - len(config.kda_layers) if context > 1 else 0
    return Exchanged(wide + moe, 1 + dealt, dealt, row * itemsize, config.vocab_size * itemsize)

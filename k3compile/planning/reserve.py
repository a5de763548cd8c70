"""Memory of a rank that is neither weights nor pools: what a step's tensors take, and what libraries do.

    reserve = 3 GiB + rows * (what one row has at its widest) + asked rows * vocabulary * 6 B

rows: max_num_batched_tokens. One row has at once the running sum, its snapshots and the normed input, and in
the wider of the two halves of a layer: KDA's q, k, v, decay, gate and output, or its experts' inputs, inner
columns and outputs, which are not summed yet. asked rows: one a request and one a draft, whose logits every
rank gathers in the model's dtype and the sampler keeps in float32. 3 GiB: the runtime, workspaces of the
libraries, buffers of collectives and what the allocator cannot give back; an assumption, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.config import K3Config
from ..runtime.engine_config import EngineConfig

FIXED = 3 << 30
ACC = 4  # bytes of what is kept in float32


class Reserve(NamedTuple):
    """Bytes; ``activations`` and ``logits`` of the largest step."""

    fixed: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(self)


def reserve(config: K3Config, engine: EngineConfig, size: int, itemsize: int) -> Reserve:
    """What one of ``size`` ranks needs. itemsize: bytes of an activation."""
    rows, asked = engine.max_num_batched_tokens, engine.max_num_seqs * (engine.num_drafts + 1)
    asked = min(asked, rows)
    row = row_bytes(config, size, itemsize)
    return Reserve(FIXED, rows * row, asked * config.vocab_size * (itemsize + ACC))


def row_bytes(config: K3Config, size: int, itemsize: int) -> int:
    """Bytes of one row at its widest."""
    residual = (config.num_snapshots + 4) * config.hidden_size * itemsize
    inner = config.kda_num_heads * config.kda_head_dim // size
    kda = inner * (6 * itemsize + 2 * ACC)  # q, k, v, raw and convolved; decay raw and bounded; gate, output
    columns = config.moe_intermediate_size // size
    routed = config.num_experts_per_token * (2 * config.latent_size + 3 * columns) * itemsize
    shared = 3 * config.shared_intermediate_size // size * itemsize
    summed = (2 * config.latent_size + config.hidden_size) * ACC
    return residual + max(kda, routed + shared + summed)

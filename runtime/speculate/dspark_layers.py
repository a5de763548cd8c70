"""One layer of the draft: latent attention with positions, no gate, then SwiGLU; ordinary residuals.

    h = h + o_proj(attend(queries(norm h), latents(norm h)))
    h = h + down(silu(gate(norm h)) * up(norm h))

Who attends to what is the caller's: serving reads the context from pages, training has it in one piece. All
of it is differentiable torch. T rows, D width, H heads of this rank, L latent, n + r query and key width.
"""

from __future__ import annotations

import torch
from k3compile.kernels.norm import rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear, Placement, RmsNorm
from ..parallel.collectives import all_reduce
from ..parallel.ranks import Ranks
from .dspark_config import DSparkConfig
from .dspark_rope import Turn, rotate


class Norm(RmsNorm):
    """The meaning of the op instead of the op, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm.meaning(x, self.weight, self.eps)


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks. Where a draft is trained it has one rank, and a collective has no gradient."""
    return x if ranks.size == 1 else all_reduce(x, ranks.group)


class Attention(nn.Module):
    """Queries of this rank's heads; their keys and values are made from latents by ``kv_b_proj``."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.q_lora_rank
        heads = place.ranks.share(config.num_attention_heads)
        self.ranks, self.heads, self.nope = place.ranks, heads, config.qk_nope_head_dim
        self.q_a_proj = Linear(place, hidden, rank)
        self.q_a_layernorm = Norm(place, rank, config.rms_norm_eps)
        self.q_b_proj = Linear(place, rank, heads * config.head_width)
        self.kv_b_proj = Linear(
            place, config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = Linear(place, heads * config.v_head_dim, hidden)

    def queries(self, x: Tensor, turn: Turn) -> Tensor:
        """Normed rows [T, D] -> [T, H, n+r], the last r of a head turned by position."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        still, moving = q.tensor_split((self.nope,), dim=-1)
        return torch.cat([still, rotate(moving, turn)], -1)

    def output(self, mixed: Tensor) -> Tensor:
        """What this rank's heads read, [T, H, v] -> the sum over all heads [T, D]."""
        return summed(self.o_proj(mixed.flatten(1)), self.ranks)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x), this rank's inner columns summed over ranks."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        inner = place.ranks.share(config.intermediate_size)
        self.ranks = place.ranks
        self.gate_proj = Linear(place, config.hidden_size, inner)
        self.up_proj = Linear(place, config.hidden_size, inner)
        self.down_proj = Linear(place, inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return summed(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), self.ranks)


class Layer(nn.Module):
    """The weights of one layer, but for ``kv_a_proj`` and its norm, which the model keeps for all at once."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = Norm(place, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(place, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, place)
        self.mlp = Mlp(config, place)

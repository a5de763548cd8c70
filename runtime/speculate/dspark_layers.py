"""One layer of the draft: latent attention with positions, no gate, then SwiGLU; ordinary residuals.

    h = h + o_proj(attend(queries(norm h), latents(norm h)))
    h = h + down(silu(gate(norm h)) * up(norm h))

Who attends to what is the caller's: serving reads the context from pages, training has it in one piece. All
of it is differentiable torch. T rows, D width, H heads, L latent, n + r query and key width.
"""

from __future__ import annotations

import torch
from k3compile.kernels.norm import rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear, Placement, RmsNorm
from .dspark_config import DSparkConfig
from .dspark_rope import Turn, rotate


class Norm(RmsNorm):
    """The meaning of the op instead of the op, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm.meaning(x, self.weight, self.eps)


class Attention(nn.Module):
    """Queries of the rows that ask; keys and values are made from latents by ``kv_b_proj``."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.heads, self.nope = heads, config.qk_nope_head_dim
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


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        self.gate_proj = Linear(place, config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(place, config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(place, config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The weights of one layer, but for ``kv_a_proj`` and its norm, which the model keeps for all at once."""

    def __init__(self, config: DSparkConfig, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = Norm(place, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(place, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, place)
        self.mlp = Mlp(config, place)

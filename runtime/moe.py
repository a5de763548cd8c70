"""The two feed-forwards: one dense MLP, or routed experts in a narrow latent beside a shared MLP.

    x --route--> weights, ids --.
    x --down--> z --experts--> rows --weigh, sum--> y --sum over ranks--> norm --up--.
    x --shared MLP--------------------------------------sum over ranks---------------+--> out

T token rows, D width, L latent, E experts, I inner columns of this rank, k experts a token. A rank holds some
columns of every expert, and all ranks choose the same experts from the same numbers.
"""

from __future__ import annotations

import torch
from k3compile.kernels import acc
from k3compile.kernels.mxfp4 import GROUP
from torch import Tensor, nn

from .config import K3Config
from .linear import Linear, Placement, RmsNorm
from .parallel.collectives import all_reduce

ops = torch.ops.k3


class Mlp(nn.Module):
    """down(act(gate(x), up(x))) with this rank's share of ``inner`` columns, reduced over ranks."""

    def __init__(self, config: K3Config, place: Placement, inner: int) -> None:
        super().__init__()
        self.group, inner = place.ranks.group, place.ranks.share(inner)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.gate_proj = Linear(place, config.hidden_size, inner)
        self.up_proj = Linear(place, config.hidden_size, inner)
        self.down_proj = Linear(place, inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        inner = ops.situ(self.gate_proj(x), self.up_proj(x), self.beta, self.linear_beta)
        return all_reduce(self.down_proj(inner), self.group)


class PackedExperts(nn.Module):
    """MXFP4 weights of all experts, packed as in the file: codes [E, out, in/2], scales [E, out, in/32]."""

    def __init__(self, config: K3Config, place: Placement) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        num, latent = config.num_experts, config.latent_size
        inner = place.ranks.share(config.moe_intermediate_size)
        for name, outputs, inputs in (("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner)):
            packed = place.parameter(num, outputs, inputs // 2, dtype=torch.uint8)
            scale = place.parameter(num, outputs, inputs // GROUP, dtype=torch.uint8)
            self.register_parameter(name, packed)
            self.register_parameter(f"{name}_scale", scale)

    def forward(self, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """z [T, L], ids [T, k] -> rows [T*k, L] grouped by expert, and idx [T, k]: the row of each choice."""
        w1, w3, w2 = (self.w1, self.w1_scale), (self.w3, self.w3_scale), (self.w2, self.w2_scale)
        return ops.experts_unfinalized(z, ids, *w1, *w3, *w2, self.beta, self.linear_beta)


class DenseExperts(nn.Module):
    """The same with weights w1, w3 [E, I, L] and w2 [E, L, I] as they are."""

    def __init__(self, config: K3Config, place: Placement) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        num, latent = config.num_experts, config.latent_size
        inner = place.ranks.share(config.moe_intermediate_size)
        self.w1 = place.parameter(num, inner, latent, dtype=place.resident)
        self.w3 = place.parameter(num, inner, latent, dtype=place.resident)
        self.w2 = place.parameter(num, latent, inner, dtype=place.resident)

    def forward(self, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ops.experts_unfinalized_dense(z, ids, self.w1, self.w3, self.w2, self.beta, self.linear_beta)


class Moe(nn.Module):
    """Routed experts (in a latent where configured) and one MLP that holds all shared experts."""

    def __init__(self, config: K3Config, place: Placement) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.group = place.ranks.group
        self.top_k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scale = config.routed_scaling_factor
        self.gate = place.parameter(config.num_experts, hidden)
        self.e_score_correction_bias = place.parameter(config.num_experts, dtype=place.acc)
        self.experts = (PackedExperts if config.experts_packed else DenseExperts)(config, place)
        self.shared_experts = Mlp(config, place, config.shared_intermediate_size)
        self.routed_expert_down_proj = Linear(place, hidden, latent) if latent else None
        self.routed_expert_norm = RmsNorm(place, latent, config.rms_norm_eps) if latent else None
        self.routed_expert_up_proj = Linear(place, latent, hidden) if latent else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        weights, ids = ops.route(
            x, self.gate, self.e_score_correction_bias, self.top_k, self.scale, self.renormalize
        )
        if self.routed_expert_down_proj is None:
            return self.routed(x, weights, ids) + self.shared_experts(x)
        y = self.routed(self.routed_expert_down_proj(x), weights, ids)
        y = self.routed_expert_up_proj(self.routed_expert_norm(y))
        return y + self.shared_experts(x)

    def routed(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """z [T, L] -> the weighted sum over each token's experts, reduced over ranks [T, L]."""
        rows, idx = self.experts(z, ids)
        chosen = rows.index_select(0, idx.clamp(min=0).flatten()).unflatten(0, (-1, self.top_k))
        weighted = chosen.to(acc(z.dtype)) * weights.unsqueeze(-1)
        here = (idx >= 0).unsqueeze(-1)  # an expert that lives elsewhere leaves -1, whatever row 0 holds
        return all_reduce(torch.where(here, weighted, 0.0).sum(1).to(z.dtype), self.group)

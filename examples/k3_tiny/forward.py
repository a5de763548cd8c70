"""The tiny K3 for training: whole rows at once, from zero states, by ops that autograd knows.

    tokens [B, T]   every row starts in an empty request, so no pools, slots or pages are needed
    weights         name -> tensor, named as in runtime's Model with unpacked experts

It computes what Model.forward computes (a test holds the two together); it is apart from it because Model
writes its states in place and a gradient does not go through that. Matrix products run in the weights'
dtype, long sums in float32. B rows, T tokens (a multiple of 16), D width, H heads, K = V channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from k3compile.kernels.op import acc_of
from k3compile.runtime.config import K3Config
from torch import Tensor
from torch.nn import functional as F

from .kda import delta_rule
from .situ import situ

Weights = Mapping[str, Tensor]
KDA = (
    "qkv_proj.weight conv_weight f_a_proj.weight f_b_proj.weight dt_bias a_log b_proj.weight g_proj.weight "
    "o_norm o_proj.weight"
)
MLA = (
    "q_proj.0.weight q_proj.1.weight q_proj.2.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight "
    "kv_b_proj.weight g_proj.weight o_proj.weight"
)
MLP = "gate_proj.weight up_proj.weight down_proj.weight"


class Result(NamedTuple):
    """Of one pass."""

    hidden: Tensor  # [B, T, D] normed, in front of lm_head
    taps: list[Tensor]  # [B, T, D] each, the running sum after the asked layers
    loads: dict[int, Tensor]  # layer -> [E] share of the choices that each expert got


class Within(NamedTuple):
    """Weights whose names begin alike."""

    weights: Weights
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}.{name}"]

    def under(self, name: str) -> Within:
        return Within(self.weights, f"{self.prefix}.{name}")

    def all(self, names: str) -> list[Tensor]:
        return [self[name] for name in names.split()]


class Pieces(NamedTuple):
    """What a layer is made of, as it stands below or compiled."""

    site: Callable
    kda: Callable
    mla: Callable
    mlp: Callable
    situ: Callable


def forward(
    config: K3Config, weights: Weights, tokens: Tensor, taps: Sequence[int] = (), pieces: Pieces | None = None
) -> Result:
    """tokens [B, T] int64 -> Result; ``weights`` as the module says, in one floating dtype."""
    pieces, eps, shape = pieces or AS_IT_STANDS, config.rms_norm_eps, (*tokens.shape, config.hidden_size)
    p = F.embedding(tokens.flatten(), weights["embed_tokens"])
    bank: list[Tensor] = []
    tapped, loads = [], {}
    for index in range(config.num_hidden_layers):
        layer = Within(weights, f"layers.{index}")
        x = pieces.site(p, bank[:], *site(layer, "self_attention_res", "input_layernorm"), eps)
        if config.is_snapshot(index):
            bank.append(p)
        attend, names = (pieces.kda, KDA) if config.is_kda(index) else (pieces.mla, MLA)
        a = attend(config, x.view(shape), *layer.under("self_attn").all(names)).flatten(0, 1)
        p = a if config.is_snapshot(index) else p + a
        x = pieces.site(p, bank[:], *site(layer, "mlp_res", "post_attention_layernorm"), eps)
        if config.is_moe(index):
            y, loads[index] = moe(config, layer.under("ffn"), x, pieces)
            p = p + y
        else:
            p = p + pieces.mlp(config, x, *layer.under("ffn").all(MLP))
        if index in taps:
            tapped.append(p.view(shape))
    ends = weights["output_attn_res.norm"], weights["output_attn_res.proj"], weights["norm.weight"]
    return Result(pieces.site(p, bank, *ends, eps).view(shape), tapped, loads)


def site(layer: Within, mixing: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
    """The weights in front of a sub-layer."""
    return layer[f"{mixing}.norm"], layer[f"{mixing}.proj"], layer[f"{norm}.weight"]


def mix_and_norm(
    p: Tensor, bank: list[Tensor], norm: Tensor, proj: Tensor, gain: Tensor, eps: float
) -> Tensor:
    """A softmax over the snapshots and the running sum, per token, and the norm of what comes out."""
    if not bank:
        return rms_norm(p, gain, eps)
    scored = (acc_of(norm) * acc_of(proj)).unsqueeze(-1)
    rows = [acc_of(row) for row in (*bank, p)]
    scores = [(row @ scored).squeeze(-1) * torch.rsqrt(row.square().mean(-1) + eps) for row in rows]
    shares = torch.stack(scores, -1).softmax(-1)
    mixed = sum(row * shares[..., at : at + 1] for at, row in enumerate(rows))
    return rms_norm(mixed.to(p.dtype), gain, eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last dimension, in x's dtype."""
    wide = acc_of(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * acc_of(gain)).to(x.dtype)


def kda(
    config: K3Config,
    x: Tensor,
    qkv_proj: Tensor,
    conv: Tensor,
    f_a: Tensor,
    f_b: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    b_proj: Tensor,
    g_proj: Tensor,
    o_norm: Tensor,
    o_proj: Tensor,
) -> Tensor:
    """x [B, T, D] -> [B, T, D]"""
    batch, length, _ = x.shape
    heads, width = config.kda_num_heads, config.kda_head_dim
    padded = F.pad(acc_of(F.linear(x, qkv_proj)), (0, 0, 3, 0))
    mixed = sum(padded[:, tap : tap + length] * acc_of(conv[:, tap]) for tap in range(4))
    q, k, v = F.silu(mixed).view(batch, length, 3, heads, width).unbind(2)
    q, k = unit(q) * width**-0.5, unit(k)
    f = acc_of(F.linear(F.linear(x, f_a), f_b))
    shifted = (f + acc_of(dt_bias)).view(batch, length, heads, width)
    g = config.gate_lower_bound * torch.sigmoid(acc_of(a_log).exp().unsqueeze(-1) * shifted)
    beta = torch.sigmoid(acc_of(F.linear(x, b_proj)))
    o = delta_rule(q, k, v, g, beta)
    gate = torch.sigmoid(acc_of(F.linear(x, g_proj)))
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + config.rms_norm_eps) * acc_of(o_norm)
    return F.linear((o.flatten(2) * gate).to(x.dtype), o_proj)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def mla(
    config: K3Config,
    x: Tensor,
    q_a: Tensor,
    q_norm: Tensor,
    q_b: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    kv_b: Tensor,
    g_proj: Tensor,
    o_proj: Tensor,
) -> Tensor:
    """x [B, T, D] -> [B, T, D]"""
    heads, nope, eps = config.num_attention_heads, config.qk_nope_head_dim, config.latent_norm_eps
    q = F.linear(rms_norm(F.linear(x, q_a), q_norm, eps), q_b).unflatten(-1, (heads, -1)).transpose(1, 2)
    latent, k_pe = F.linear(x, kv_a).tensor_split((config.kv_lora_rank,), dim=-1)
    kv = F.linear(rms_norm(latent, kv_norm, eps), kv_b).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = kv.tensor_split((nope,), dim=-1)
    k = torch.cat([k, k_pe.unsqueeze(1).expand(-1, heads, -1, -1)], -1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return F.linear(o * torch.sigmoid(F.linear(x, g_proj)), o_proj)


def mlp(config: K3Config, x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """The dense MLP and the shared expert."""
    inner = situ(F.linear(x, gate_proj), F.linear(x, up_proj), config.situ_beta, config.situ_linear_beta)
    return F.linear(inner, down_proj)


def moe(config: K3Config, own: Within, x: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """x [N, D] -> [N, D], and each expert's share of the choices [E]."""
    top_k, experts = config.num_experts_per_token, config.num_experts
    scores = torch.sigmoid(F.linear(acc_of(x), acc_of(own["gate"])))
    ids = (scores.detach() + acc_of(own["e_score_correction_bias"])).topk(top_k, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    z = F.linear(x, own["routed_expert_down_proj.weight"])
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=experts)
    grouped = Permute.apply(z.repeat_interleave(top_k, 0), order).split(counts.tolist())
    betas = config.situ_beta, config.situ_linear_beta
    done = [
        F.linear(pieces.situ(F.linear(rows, w1), F.linear(rows, w3), *betas), w2)
        for rows, w1, w3, w2 in zip(grouped, *(own[f"experts.{w}"].unbind(0) for w in ("w1", "w3", "w2")))
    ]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    rows = Permute.apply(torch.cat(done), back).view(-1, top_k, z.shape[1])
    y = (acc_of(rows) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    y = rms_norm(y, own["routed_expert_norm.weight"], config.rms_norm_eps)
    y = F.linear(y, own["routed_expert_up_proj.weight"])
    return y + pieces.mlp(config, x, *own.under("shared_experts").all(MLP)), counts / counts.sum()


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient comes back by the opposite one, not by adding."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


AS_IT_STANDS = Pieces(mix_and_norm, kda, mla, mlp, situ)


def compiled() -> Pieces:
    """The same pieces through Inductor: one graph a shape; the first step takes a minute for it."""
    torch._dynamo.config.recompile_limit = 64  # three lengths of rows, three depths of the bank
    fixed = [torch.compile(piece, dynamic=False) for piece in AS_IT_STANDS[:-1]]
    return Pieces(*fixed, torch.compile(situ, dynamic=True))

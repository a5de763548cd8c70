"""The two attentions. Each takes the normed layer input, the layer's pools and the step.

    Kda   a recurrent state per request     verify rows and other rows go through different ops
    Mla   a row of latents per token        all rows alike

T token rows, R requests, D width, H heads of this rank, K = V channels of a KDA head, C = 3HK.
"""

from __future__ import annotations

import torch
from k3compile.kernels import acc
from torch import Tensor, nn

from .cache.pools import KdaPools, MlaPools
from .config import K3Config
from .linear import Linear, Placement, RmsNorm
from .parallel.collectives import all_gather, all_reduce, all_to_all
from .step import Step

ops = torch.ops.k3


class Kda(nn.Module):
    """Delta-rule attention with a decay per key channel, and a short convolution before it.

    state_replay: verify rows leave the state alone and record what a commit needs; without it they write the
    state after every row to the slots of ``Step.scratch``.
    """

    def __init__(self, config: K3Config, place: Placement, state_replay: bool = True) -> None:
        super().__init__()
        width, hidden = config.kda_head_dim, config.hidden_size
        heads = place.ranks.share(config.kda_num_heads)
        inner = heads * width
        self.heads, self.width, self.group = heads, width, place.ranks.group
        self.lower_bound, self.eps = config.gate_lower_bound, config.rms_norm_eps
        self.state_replay = state_replay
        self.qkv_proj = Linear(place, hidden, 3 * inner)
        self.conv_weight = place.parameter(3 * inner, 4, dtype=place.acc)
        self.f_a_proj = Linear(place, hidden, width)
        self.f_b_proj = Linear(place, width, inner)
        self.b_proj = Linear(place, hidden, heads)
        self.a_log = place.parameter(heads, dtype=place.acc)
        self.dt_bias = place.parameter(inner, dtype=place.acc)
        if config.use_full_rank_gate:
            self.g_proj = Linear(place, hidden, inner)
        else:
            self.g_proj = nn.Sequential(Linear(place, hidden, width), Linear(place, width, inner))
        self.o_norm = place.parameter(width, dtype=place.acc)
        self.o_proj = Linear(place, inner, hidden)

    def forward(self, x: Tensor, pools: KdaPools, step: Step) -> Tensor:
        """x [T, D] -> this rank's sum over heads, reduced over ranks [T, D]; advances ``pools``."""
        qkv = self.qkv_proj(x)  # [T, C], raw: what the conv window remembers
        decay = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.heads, self.width))
        g = ops.kda_decay(decay, self.a_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).to(acc(x.dtype)))

        verify, other = rows_of(step, x.shape[0], x.device)
        slots_verify, slots_other = split_slots(step)
        o_verify = self.verify(
            qkv.index_select(0, verify),
            g.index_select(0, verify),
            beta.index_select(0, verify),
            pools,
            slots_verify,
            step.cu_verify,
            step.scratch,
        )
        o_other = self.prefill(
            qkv.index_select(0, other),
            g.index_select(0, other),
            beta.index_select(0, other),
            pools,
            slots_other,
            step.cu_other,
        )
        o = x.new_empty(x.shape[0], self.heads, self.width)
        o.index_copy_(0, verify, o_verify)
        o.index_copy_(0, other, o_other)

        gate = self.g_proj(x).unflatten(-1, (self.heads, self.width))
        o = ops.gated_rms_norm(o, gate, self.o_norm, self.eps)
        return all_reduce(self.o_proj(o.flatten(1)), self.group)

    def verify(
        self,
        qkv: Tensor,
        g: Tensor,
        beta: Tensor,
        pools: KdaPools,
        slots: Tensor,
        cu: Tensor,
        scratch: Tensor,
    ) -> Tensor:
        """Rows of drafts: what any number of them leads to is recorded, or put in scratch.  -> [Tv, H, V]"""
        if not self.state_replay:
            mixed = ops.short_conv_verify_states(qkv, self.conv_weight, pools.window, slots, cu, scratch)
            q, k, v = self.heads_of(mixed)
            return ops.kda_verify_states(q, k, v, g, beta, pools.state, slots, cu, scratch)
        mixed = ops.short_conv_verify(qkv, self.conv_weight, pools.window, slots, cu, pools.rec_x)
        q, k, v = self.heads_of(mixed)
        records = (pools.rec_u, pools.rec_k, pools.rec_g)
        return ops.kda_verify(q, k, v, g, beta, pools.state, slots, cu, *records)

    def prefill(
        self, qkv: Tensor, g: Tensor, beta: Tensor, pools: KdaPools, slots: Tensor, cu: Tensor
    ) -> Tensor:
        """Rows of prompts and single tokens: the state moves to the end of each row.  -> [To, H, V]"""
        mixed = ops.short_conv(qkv, self.conv_weight, pools.window, slots, cu)
        q, k, v = self.heads_of(mixed)
        return ops.kda_prefill(q, k, v, g, beta, pools.state, slots, cu)

    def heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, C] -> q, k, v [t, H, K]; q and k of length 1 per head, q scaled by K^-0.5."""
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.width)).unbind(1)
        return ops.l2_norm(q, self.width**-0.5), ops.l2_norm(k, 1.0), v


def rows_of(step: Step, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token rows of the verify requests and of the others, as index tensors made from host sizes."""
    num_verify, num_decode, num_prefill = (step.spans[i].item() for i in range(3))
    torch._check(num_verify >= 0)
    torch._check(num_decode >= 0)
    torch._check(num_prefill >= 0)
    torch._check(num_verify + num_decode + num_prefill == tokens)
    verify = torch.arange(num_verify, device=device)
    other = torch.arange(num_verify, num_verify + num_decode + num_prefill, device=device)
    return verify, other


def split_slots(step: Step) -> tuple[Tensor, Tensor]:
    """State slots of the verify requests and of the others."""
    num_verify = step.cu_verify.shape[0] - 1
    num_other = step.cu_other.shape[0] - 1
    torch._check(num_verify >= 0)
    torch._check(num_other >= 0)
    torch._check(num_verify + num_other == step.slots.shape[0])
    return step.slots[:num_verify], step.slots[num_verify:]


class Mla(nn.Module):
    """Attention over latents without positions; an output gate and a low-rank query where configured.

    Where ranks form context groups each keeps the latents of some tokens: token p those of rank
    p // interleave mod ``context`` in its group.
    """

    interleave = 1

    def __init__(self, config: K3Config, place: Placement) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.latent_norm_eps
        heads = place.ranks.share(config.num_attention_heads)
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.heads, self.width, self.group = heads, width, place.ranks.group
        self.context, self.context_group = place.ranks.context, place.ranks.context_group
        self.latent, self.nope, self.value = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        if config.q_lora_rank:
            self.q_proj = nn.Sequential(
                Linear(place, hidden, config.q_lora_rank),
                RmsNorm(place, config.q_lora_rank, eps),
                Linear(place, config.q_lora_rank, heads * width),
            )
        else:
            self.q_proj = Linear(place, hidden, heads * width)
        self.kv_a_proj_with_mqa = Linear(place, hidden, self.latent + config.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(place, self.latent, eps)
        self.kv_b_proj = Linear(place, self.latent, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.g_proj = Linear(place, hidden, heads * config.v_head_dim) if config.mla_use_output_gate else None
        self.o_proj = Linear(place, heads * config.v_head_dim, hidden)

    def forward(self, x: Tensor, pools: MlaPools, step: Step) -> Tensor:
        """x [T, D] -> this rank's sum over heads, reduced over ranks [T, D]; writes this step's latents."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.width))
        latent, k_pe = self.kv_a_proj_with_mqa(x).tensor_split((self.latent,), dim=1)
        row = torch.cat([self.kv_a_layernorm(latent), k_pe], dim=1)  # k_pe: neither normed nor rotated

        where = pools.pages, step.pages, step.seen, joined_cu(step)
        attend = self.attend if self.context == 1 else self.attend_together
        o = attend(q, row, *where).flatten(1)
        if self.g_proj is not None:
            o = o * torch.sigmoid(self.g_proj(x))
        return all_reduce(self.o_proj(o), self.group)

    def attend(self, q: Tensor, row: Tensor, *where: Tensor) -> Tensor:
        """q [T, H, n+r], row [T, L+r] -> [T, H, v]; every token's latents are here."""
        ops.mla_write(row, *where)
        return ops.mla_attend(q, self.kv_b_proj.weight.to(q.dtype), *where, self.width**-0.5)

    def attend_together(self, q: Tensor, row: Tensor, *where: Tensor) -> Tensor:
        """The same where each rank of the context group has some tokens' latents.

        Of the first rows the queries go to all ranks, and what they found on each comes back and is merged:
        as many bytes whatever the length of the context. To the others, which have many queries, the context
        comes. How many go is a matter of bytes, and the same on all ranks.
        """
        kv_b, ranks, group = self.kv_b_proj.weight.to(q.dtype), self.context, self.context_group
        place = ops.context_place(group, self.interleave)
        ops.mla_write_shard(row, *where, place)
        first = ops.exchanged_rows(*where[2:], *self.costs(q)).item()
        torch._check(first >= 0)
        torch._check(first <= q.shape[0])
        asked = all_gather(ops.mla_absorb(q[:first], kv_b, self.nope), ranks, group)  # [ranks * H, t, L+r]
        o, lse = ops.mla_attend_shard(asked, *where, place, self.latent, self.width**-0.5)
        found = torch.cat([o, lse.unsqueeze(2)], 2).unflatten(0, (ranks, self.heads))
        parts = all_to_all(found, ranks, group)  # [ranks, H, t, L+1]: this rank's heads, over all tokens
        mean = ops.lse_merge(parts[..., : self.latent], parts[..., self.latent])
        done = ops.mla_expand(mean, kv_b, self.value)
        return ops.mla_attend_gathered(q, kv_b, done, *where, row, group, self.interleave)

    def costs(self, q: Tensor) -> tuple[int, int]:
        """Bytes that a rank gets for a query that goes to all ranks, and for a token that comes to it."""
        row = self.width - self.nope + self.latent
        query = acc(q.dtype).itemsize * (row + self.latent + 1)
        return self.context * self.heads * query, q.element_size() * row


def joined_cu(step: Step) -> Tensor:
    """[R+1]: running token counts of all requests, verify first."""
    num_verify = step.spans[0].item()
    return torch.cat([step.cu_verify, step.cu_other[1:] + num_verify])

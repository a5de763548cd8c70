"""The DSpark draft: features of the target's layers become context, one pass over a block gives K drafts.

    taps [n, T, D] --concat, context_proj, norm--> ctx --kv_a_proj of all layers at once--> latents, kept

    anchor  mask  mask ...      K rows of a request at positions seen, seen + 1, ..
      |      |     |            layers: each row sees all context and all K rows
    hid_0  hid_1  hid_2         final_norm; the target's head makes base_k
      +--------+-----+--------- base_k + markov_w2 @ markov_w1[token before]  ->  the token after row k

T token rows, D width, n taps, L latent, r rotated, V vocabulary, K rows of a block, l layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from k3compile.kernels import acc
from k3compile.kernels.norm import rms_norm
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.pools import MlaPools
from ..linear import Linear, Placement
from ..model import DTYPES, Model
from ..parallel.ranks import Ranks, world
from ..parallel.sharding import draft_objections
from .dspark_config import DSparkConfig
from .dspark_layers import Layer, Norm
from .dspark_rope import Turn, rotate
from .dspark_training import dense_attention

Attend = Callable[[int, Tensor, Tensor], Tensor]  # layer, queries [T, H, n+r], own rows [T, L+r] -> [T, H, v]


class BlockLogits(NamedTuple):
    """What training_logits returns for A anchors of B sequences; float32 (float64 for a float64 model)."""

    logits: Tensor  # [B, A, K, V] of the token at position anchor + 1 + k
    confidence: Tensor  # [B, A, K] before the sigmoid: whether that token will be accepted


class DSparkModel(nn.Module):
    """One rank's part of the draft's own parameters, unfilled and without gradient; embedding and head are
    the target's. Context projection, latents and Markov tables are whole on every rank.

    dtype: of activations. resident: of the matrices, default ``dtype``. ranks: who shares it, as the target,
    default all ranks of this process group. Raises ValueError for other dtypes than a Model takes
    and for what the ranks cannot divide.
    """

    def __init__(
        self,
        config: DSparkConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        resident: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        for name, given in (("dtype", dtype), ("resident", resident or dtype)):
            if given not in DTYPES:
                raise ValueError(f"{name} is {given}, and must be one of {', '.join(map(str, DTYPES))}")
        ranks = ranks or world()
        if objections := draft_objections(config, ranks.size):
            raise ValueError("; ".join(objections))
        place = Placement(dtype, resident or dtype, torch.device(device), ranks)
        hidden, layers, eps = config.hidden_size, config.num_hidden_layers, config.rms_norm_eps
        self.config, self.place = config, place
        self.frequencies = config.yarn.frequencies(config.qk_rope_head_dim).to(place.device)
        self.context_proj = Linear(place, len(config.target_layer_ids) * config.target_hidden_size, hidden)
        self.context_norm = Norm(place, hidden, eps)
        self.kv_a_proj = place.parameter(layers, config.row, hidden, dtype=place.resident)
        self.kv_a_layernorm = place.parameter(layers, config.kv_lora_rank)
        self.layers = nn.ModuleList(Layer(config, place) for _ in range(layers))
        self.final_norm = Norm(place, hidden, eps)
        self.markov_w1 = place.parameter(config.vocab_size, config.markov_rank, dtype=place.resident)
        self.markov_w2 = place.parameter(config.vocab_size, config.markov_rank, dtype=place.resident)
        self.confidence_weight = place.parameter(1, hidden + config.markov_rank, dtype=place.acc)
        self.confidence_bias = place.parameter(1, dtype=place.acc)

    def turn(self, positions: Tensor) -> Turn:
        """How rows at positions [T] are rotated."""
        return self.config.yarn.turn(positions, self.frequencies, self.place.dtype)

    def context_rows(self, taps: Tensor, positions: Tensor) -> Tensor:
        """Taps [n, T, D] of target tokens at positions [T] -> the rows every layer keeps, [l, T, L+r]."""
        ctx = self.context_norm(self.context_proj(torch.cat(taps.to(self.place.dtype).unbind(0), -1)))
        both = F.linear(ctx, self.kv_a_proj.flatten(0, 1).to(ctx.dtype))  # [T, l * (L+r)]
        turn = self.turn(positions)
        parts = both.unflatten(-1, (len(self.layers), -1)).unbind(1)
        return torch.stack([self.latent_rows(i, part, turn) for i, part in enumerate(parts)])

    def latent_rows(self, layer: int, both: Tensor, turn: Turn) -> Tensor:
        """What ``kv_a_proj`` gave, [T, L+r] -> latent normed, key turned."""
        latent, key = both.tensor_split((self.config.kv_lora_rank,), dim=-1)
        normed = rms_norm.meaning(latent, self.kv_a_layernorm[layer], self.config.rms_norm_eps)
        return torch.cat([normed, rotate(key, turn)], -1)

    def hidden(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The layers over rows [T, D] at positions [T]; ``attend`` says what each row sees.  -> [T, D]"""
        h, turn = embedded, self.turn(positions)
        for i, layer in enumerate(self.layers):
            x = layer.input_layernorm(h)
            own = self.latent_rows(i, F.linear(x, self.kv_a_proj[i].to(x.dtype)), turn)
            mixed = attend(i, layer.self_attn.queries(x, turn), own)
            h = h + layer.self_attn.output(mixed)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.final_norm(h)

    def embed(self, tokens: Tensor, target: Model) -> Tensor:
        """The target's embedding of token ids, in the draft's dtype."""
        return target.embed(tokens).to(self.place.dtype)

    def markov(self, before: Tensor) -> Tensor:
        """markov_w1 of the tokens before, [...] -> [..., rank]."""
        return F.embedding(before, self.markov_w1).to(self.place.dtype)

    def logits(self, base: Tensor, markov: Tensor) -> Tensor:
        """The target's head over hid, [..., V], and markov [..., rank] -> scores of the next token."""
        return (base + F.linear(markov, self.markov_w2.to(markov.dtype))).to(acc(base.dtype))

    def confidence(self, hid: Tensor, markov: Tensor) -> Tensor:
        """[..., D] and [..., rank] -> [...], before the sigmoid, in float32 (float64)."""
        features = torch.cat([hid, markov], -1).to(self.confidence_weight.dtype)
        return F.linear(features, self.confidence_weight, self.confidence_bias).squeeze(-1)

    def make_pools(self, num_pages: int, page_size: int) -> list[MlaPools]:
        """Zeroed pages, one set a layer, over the same page numbers as the target's."""
        shape = (len(self.layers), num_pages, page_size, self.config.row)
        pages = torch.zeros(shape, dtype=self.place.dtype, device=self.place.device)
        return list(map(MlaPools, pages.unbind(0)))

    def training_logits(
        self,
        taps: Tensor,
        tokens: Tensor,
        anchors: Tensor,
        target: Model,
        block: int | None = None,
        previous: Tensor | None = None,
    ) -> BlockLogits:
        """All blocks of some sequences at once, without a cache, differentiable.

        taps [B, T, n, D]: the target's, of every position. tokens [B, T]. anchors [A] or [B, A]: positions of
        anchor tokens in 0 .. T-1; a block sees the context before its anchor only. target: whose embedding
        and head are used; they get gradients only if they ask for them. block: K, default the checkpoint's.
        previous [B, A, K]: the token before each predicted one, default the true one, tokens[anchor + k].

        Row k of an anchor predicts tokens[anchor + 1 + k]; where that is past the end the row means nothing
        and the caller leaves it out of the loss.
        """
        rows, length = tokens.shape
        size = block or self.config.block_size
        anchors = anchors.expand(rows, -1)  # [B, A]
        places = anchors.unsqueeze(-1) + torch.arange(size, device=tokens.device)  # [B, A, K]
        truth = tokens.gather(1, places.flatten(1).clamp(max=length - 1)).view(places.shape)
        asked = torch.full_like(truth, self.config.mask_token_id)
        asked[..., 0] = truth[..., 0]
        every = torch.arange(length, device=tokens.device).repeat(rows)
        context = self.context_rows(taps.flatten(0, 1).transpose(0, 1), every)  # [l, B * T, L+r]
        context = context.unflatten(1, (rows, length))

        def attend(layer: int, q: Tensor, own: Tensor) -> Tensor:
            kv_b = self.layers[layer].self_attn.kv_b_proj.weight
            return dense_attention(q, kv_b, context[layer], own, anchors, size, self.config.softmax_scale)

        hid = self.hidden(self.embed(asked.flatten(), target), places.flatten(), attend)
        hid = hid.view(*places.shape, -1)
        markov = self.markov(truth if previous is None else previous)
        return BlockLogits(self.logits(target.logits(hid), markov), self.confidence(hid, markov))

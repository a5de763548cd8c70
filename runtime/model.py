"""Kimi K3's text model, and Kimi-Linear, written plainly: what is fast is computed from this.

    P = embed(tokens)                     P: the running sum [T, D]
    each layer:   h = mix(P, bank)        bank: snapshots of P [n, T, D]; the mix is over depth, per token
                  P = P + attn(norm(h))   a snapshot layer banks P first and then restarts it: P = attn(...)
                  P = P + ffn(norm(mix(P, bank)))
    hidden = norm(mix(P, bank))           logits = lm_head(hidden)

Kimi-Linear has no bank and no mix. T token rows, D width, n snapshots so far, S slots, N pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from k3compile.kernels import acc
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Kda, Mla
from .cache.pools import KdaPools, MlaPools
from .config import K3Config
from .linear import Linear, Placement, RmsNorm
from .moe import Mlp, Moe
from .parallel.collectives import all_gather, all_reduce
from .parallel.ranks import Ranks, world
from .parallel.sharding import check
from .step import Step

# For torch.compiler.config.patch(unbacked_sources=...) around torch.compile(DecoderLayer.forward): every
# ragged dimension, by name, because activations between layers carry no marks. Leave one out and some kind
# of layer is compiled again for each new batch.
UNBACKED_SOURCES = ",".join(
    [
        *("L['p']:0", "L['blocks']:0", "L['blocks']:1"),
        *(f"L['step'].{name}:0" for name in ("tokens", "cu_verify", "cu_other", "slots", "seen", "pages")),
        *("L['step'].pages:1", "L['step'].scratch:0", "L['step'].scratch:1", "L['step'].anchor:0"),
    ]
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # that a model is run in and kept in


class DepthMix(nn.Module):
    """Attention Residuals: a softmax over the running sum and the snapshots, scored by one gained row."""

    def __init__(self, config: K3Config, place: Placement) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm = place.parameter(config.hidden_size)
        self.proj = place.parameter(config.hidden_size)

    def forward(self, p: Tensor, blocks: Tensor) -> Tensor:
        """p [T, D], blocks [n, T, D] -> [T, D]"""
        return torch.ops.k3.attn_res_mix(p, blocks, self.norm, self.proj, self.eps)


class DecoderLayer(nn.Module):
    """Attention, then feed-forward. Layers of one kind (K3Config.kind) differ in their weights alone."""

    def __init__(self, config: K3Config, index: int, place: Placement, state_replay: bool = True) -> None:
        super().__init__()
        self.snapshot = config.is_snapshot(index)
        depth = bool(config.attn_res_block_size)
        self.self_attention_res = DepthMix(config, place) if depth else None
        self.mlp_res = DepthMix(config, place) if depth else None
        self.input_layernorm = RmsNorm(place, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(place, config.hidden_size, config.rms_norm_eps)
        if config.is_kda(index):
            self.self_attn = Kda(config, place, state_replay)
        else:
            self.self_attn = Mla(config, place)
        if config.is_moe(index):
            self.ffn = Moe(config, place)
        else:
            self.ffn = Mlp(config, place, config.intermediate_size)

    def forward(self, p: Tensor, blocks: Tensor, pools: KdaPools | MlaPools, step: Step) -> Tensor:
        """p [T, D] -> p after the layer; ``pools`` are advanced.

        blocks [n, T, D]: at a snapshot layer the last one is ``p`` itself, which the first mix leaves out.
        """
        torch._check(blocks.shape[1] == p.shape[0])
        h = p
        if self.self_attention_res is not None:
            h = self.self_attention_res(p, blocks[:-1] if self.snapshot else blocks)
        a = self.self_attn(self.input_layernorm(h), pools, step)
        p = h = a if self.snapshot else p + a
        if self.mlp_res is not None:
            h = self.mlp_res(p, blocks)
        return p + self.ffn(self.post_attention_layernorm(h))


def check_arguments(
    config: K3Config, dtype: torch.dtype, resident: torch.dtype, tap_layers: Sequence[int]
) -> None:
    """Refuse what would go wrong silently: float16 overflows, and a tap past the end is not taken."""
    for name, given in (("dtype", dtype), ("resident", resident)):
        if given not in DTYPES:
            raise ValueError(f"{name} is {given}, and must be one of {', '.join(map(str, DTYPES))}")
    depth, taps = config.num_hidden_layers, list(tap_layers)
    if taps != sorted(set(taps)) or any(not 0 <= tap < depth for tap in taps):
        raise ValueError(f"tap_layers {taps} must rise and lie in 0 .. {depth - 1}: there are {depth} layers")


def scores(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden [..., D], head [V, D] -> [..., V]"""
    return F.linear(hidden, head.to(hidden.dtype))


def kept_of(page_size: int, context: int) -> int:
    """Tokens of a page that each of ``context`` ranks keeps."""
    turn = context * Mla.interleave if context > 1 else 1
    if page_size % turn:
        raise ValueError(
            f"page_size={page_size} cannot be dealt out over context groups of {context} ranks: "
            f"give a multiple of {turn}"
        )
    return page_size // context


class Model(nn.Module):
    """One rank's part of the text model. Parameters come unfilled; weights.load_model fills them.

    dtype: of activations. resident: of the matrices, default ``dtype``. tap_layers: layers after which the
    running sum is returned as well, for a draft model. state_replay: keep one state a request and records of
    its last verify step, or (False) the state after each of its rows. ranks: who shares the model, default
    all ranks of this process group. Raises ValueError for a dtype we do not run, for taps that are not
    layers in rising order, and for what the ranks cannot divide.
    """

    def __init__(
        self,
        config: K3Config,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        resident: torch.dtype | None = None,
        tap_layers: Sequence[int] = (),
        state_replay: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        check_arguments(config, dtype, resident or dtype, tap_layers)
        ranks = ranks or world()
        check(config, ranks.size, ranks.context)
        place = Placement(dtype, resident or dtype, torch.device(device), ranks)
        self.config, self.place, self.tap_layers = config, place, tuple(tap_layers)
        self.state_replay = state_replay
        vocab = ranks.share(config.vocab_size)
        self.embed_tokens = place.parameter(vocab, config.hidden_size, dtype=place.resident)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, place, state_replay) for i in range(config.num_hidden_layers)
        )
        self.output_attn_res = DepthMix(config, place) if config.attn_res_block_size else None
        self.norm = RmsNorm(place, config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(place, config.hidden_size, vocab)

    def forward(
        self,
        step: Step,
        pools: Sequence[KdaPools | MlaPools],
        layer: Callable[..., Tensor] = DecoderLayer.forward,
    ) -> tuple[Tensor, Tensor]:
        """One pass over the rows of ``step`` -> (hidden [T, D], taps [num taps, T, D]).

        pools: one a layer, from make_pools; advanced. layer: what runs a layer, e.g. the compiled forward.
        """
        p = self.embed(step.tokens)
        bank = p.new_empty(self.config.num_snapshots, *p.shape)
        banked, taps = 0, []
        for index, (block, pool) in enumerate(zip(self.layers, pools, strict=True)):
            if block.snapshot:
                bank[banked] = p
                banked += 1
            p = layer(block, p, bank[:banked], pool, step)
            if index in self.tap_layers:
                taps.append(p)
        mixed = p if self.output_attn_res is None else self.output_attn_res(p, bank)
        return self.norm(mixed), torch.stack(taps) if taps else p.new_empty(0, *p.shape)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., D]: each from the rank that has its row, the other ranks add zeros."""
        ranks, rows = self.place.ranks, self.embed_tokens.shape[0]
        if ranks.size == 1:
            return F.embedding(tokens, self.embed_tokens).to(self.place.dtype)
        local = tokens - ranks.rank * rows
        here = (local >= 0) & (local < rows)
        found = F.embedding(torch.where(here, local, 0), self.embed_tokens).to(self.place.dtype)
        return all_reduce(torch.where(here.unsqueeze(-1), found, 0.0), ranks.group)

    def logits(self, hidden: Tensor, score: Callable[[Tensor, Tensor], Tensor] = scores) -> Tensor:
        """hidden [..., D] -> [..., vocabulary]: every rank scores its own tokens, and all get all scores.

        score: what multiplies, e.g. the compiled product.
        """
        ranks = self.place.ranks
        head = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        own = score(hidden, head)
        if ranks.size == 1:
            return own
        rows = own.reshape(-1, own.shape[-1])
        every = all_gather(rows, ranks.size, ranks.group).view(ranks.size, *rows.shape)  # [n, N, V / n]
        return every.transpose(0, 1).reshape(*own.shape[:-1], ranks.size * own.shape[-1])

    def make_pools(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_drafts: int = 0,
        record_slots: int | None = None,
    ) -> list[KdaPools | MlaPools]:
        """Zeroed pools, one a layer, each a view of one tensor per kind. Slot 0 and page 0 are nobody's.

        State, window and records are of this rank's heads; a page has this rank's part of its tokens.
        num_slots: S, num_pages: N, both with the null one. max_drafts: drafts a verify row may hold.
        record_slots: the first slots, the null one among them, that have records (None: all, or none without
        state replay). A slot has to be zero again before another request starts in it. Of a page a rank of a
        context group keeps its share; raises ValueError for a page_size that they cannot share.
        """
        config, place = self.config, self.place
        if record_slots is None:
            record_slots = num_slots if self.state_replay else 0
        heads, width, records = place.ranks.share(config.kda_num_heads), config.kda_head_dim, max_drafts + 1
        num_kda = len(config.kda_layers)
        num_mla = config.num_hidden_layers - num_kda

        def zeros(layers: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
            return list(torch.zeros(layers, *shape, dtype=dtype, device=place.device).unbind(0))

        wide, channels = acc(place.dtype), 3 * heads * width
        state = zeros(num_kda, num_slots, heads, width, width, dtype=wide)
        window = zeros(num_kda, num_slots, 3, channels, dtype=place.dtype)
        rec_u = zeros(num_kda, record_slots, records, heads, width, dtype=wide)
        rec_k = zeros(num_kda, record_slots, records, heads, width, dtype=wide)
        rec_g = zeros(num_kda, record_slots, records, heads, width, dtype=wide)
        rec_x = zeros(num_kda, record_slots, records, channels, dtype=place.dtype)
        kda = map(KdaPools, state, window, rec_u, rec_k, rec_g, rec_x)
        row = config.kv_lora_rank + config.qk_rope_head_dim
        tokens = kept_of(page_size, place.ranks.context)
        mla = map(MlaPools, zeros(num_mla, num_pages, tokens, row, dtype=place.dtype))
        return [next(kda if config.is_kda(i) else mla) for i in range(config.num_hidden_layers)]

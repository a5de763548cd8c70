"""The passes of a draft model, on every rank that has a part of it: context from taps, and blocks.

    position      0 ........ seen - 1     seen      seen + 1 ..  seen + K - 1
    token         committed               anchor    mask         mask
    draft pages   context rows            none: the block's own rows are kept nowhere

Context rows lie in pages of the draft's own under the target's page numbers, so whatever owns, shares, evicts
or stores a page does so for both. A rejected row is overwritten by the row that takes its position. T token
rows, n taps, D width, R requests, P page columns, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from k3compile.kernels.choice import Compute, by_meaning
from torch import Tensor

from ..attention import joined_cu
from ..cache.pools import MlaPools
from ..model import Model
from ..step import Step
from .dspark_model import DSparkModel


class Block(NamedTuple):
    """What one pass gives for R anchors."""

    hid: Tensor  # [R, K, D]
    base: Tensor  # [R, K, V] the target's head over it


class DraftBlocks:
    """``draft`` over ``pools`` from its make_pools, making blocks of ``size`` rows.

    target: the model whose taps are observed and whose embedding and head are shared.
    """

    def __init__(self, draft: DSparkModel, target: Model, pools: Sequence[MlaPools], size: int) -> None:
        self.draft, self.target, self.pools, self.size = draft, target, list(pools), size

    @torch.no_grad()
    def observe(self, step: Step, taps: Tensor) -> None:
        """Write the context rows of all rows of a step; ``taps`` [n, T, D]. Needs no other rank."""
        cu = joined_cu(step)
        row = torch.repeat_interleave(torch.arange(len(cu) - 1, device=cu.device), cu.diff())
        positions = torch.arange(len(row), device=cu.device) + (step.seen - cu[:-1])[row]
        rows = self.draft.context_rows(taps[:, : len(row)], positions)
        for pool, latent in zip(self.pools, rows, strict=True):
            torch.ops.k3.mla_write(latent, pool.pages, step.pages, step.seen, cu)

    @torch.no_grad()
    def run(self, anchors: Tensor, seen: Tensor, table: Tensor, compute: Compute = by_meaning) -> Block:
        """One pass over a block for each anchor token [R] at position seen [R], page table [R, P]. compute:
        the attention.
        """
        config, size, device = self.draft.config, self.size, seen.device
        tokens = torch.full((len(anchors), size), config.mask_token_id, device=device)
        tokens[:, 0] = anchors
        positions = seen.unsqueeze(1) + torch.arange(size, device=device)
        cu = torch.arange(0, tokens.numel() + 1, size, device=device)

        def attend(layer: int, q: Tensor, own: Tensor) -> Tensor:
            kv_b = self.draft.layers[layer].self_attn.kv_b_proj.weight
            if kv_b.dtype != torch.bfloat16:  # which is read as it is
                kv_b = kv_b.to(q.dtype)
            places = self.pools[layer].pages, table, seen, cu
            return compute("mla_attend_block", q, kv_b, *places, own, config.softmax_scale)

        embedded = self.draft.embed(tokens.flatten(), self.target)
        hid = self.draft.hidden(embedded, positions.flatten(), attend).view(*tokens.shape, -1)
        return Block(hid, self.target.logits(hid))

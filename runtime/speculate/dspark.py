"""Drafts by DSpark: after each forward its taps become context rows, before the next one blocks are drafted.

    position      0 ........ seen - 1     seen      seen + 1 ..  seen + K - 1
    token         committed               anchor    mask         mask
    draft pages   context rows            none: the block's own rows are kept nowhere

Context rows lie in pages of the draft's own under the target's page numbers, so whatever owns, shares, evicts
or stores a page does so for both. A rejected row is overwritten by the row that takes its position.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from k3compile.kernels import acc
from torch import Tensor

from ..attention import joined_cu
from ..cache.pools import MlaPools
from ..model import Model
from ..request import Request
from ..sampler import pick
from ..step import Step
from .draft import Draft
from .dspark_model import DSparkModel

if TYPE_CHECKING:
    from ..cache.holding import Holding

log = logging.getLogger(__name__)


class DSparkDrafter:
    """Drafts ``num_drafts`` tokens a request with ``draft``, over ``pools`` from its make_pools.

    target: the model whose taps are observed and whose embedding and head are shared. sampling:
    "probabilistic" draws from the draft's distribution at the request's temperature, "greedy" takes its best
    token; a greedy request always gets the best. Raises ValueError for more drafts than the checkpoint was
    made for, and for a target that taps other layers.
    """

    lookahead = 0  # no page is written past the committed tokens

    def __init__(
        self,
        draft: DSparkModel,
        target: Model,
        pools: Sequence[MlaPools],
        num_drafts: int,
        sampling: str = "probabilistic",
    ) -> None:
        most = draft.config.block_size
        if not 1 <= num_drafts <= most:
            raise ValueError(
                f"num_drafts is {num_drafts}, and this draft proposes 1 to {most} tokens at once"
            )
        if sampling not in ("probabilistic", "greedy"):
            raise ValueError(f"sampling is {sampling!r}, and must be probabilistic or greedy")
        self.taps = draft.config.target_layer_ids
        if tuple(target.tap_layers) != self.taps:
            raise ValueError(f"the target taps {target.tap_layers}, the draft reads {self.taps}")
        self.draft, self.target, self.pools = draft, target, list(pools)
        self.num_drafts, self.sampling = num_drafts, sampling
        self.broken = 0  # drafts that were not finite and were thrown away
        self._salts: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()

    @torch.no_grad()
    def observe(self, step: Step, taps: Tensor) -> None:
        """Write the context rows of all rows of a step; ``taps`` [n, T, D]."""
        cu = joined_cu(step)
        row = torch.repeat_interleave(torch.arange(len(cu) - 1, device=cu.device), cu.diff())
        positions = torch.arange(len(row), device=cu.device) + (step.seen - cu[:-1])[row]
        rows = self.draft.context_rows(taps[:, : len(row)], positions)
        for pool, latent in zip(self.pools, rows, strict=True):
            torch.ops.k3.mla_write(latent, pool.pages, step.pages, step.seen, cu)

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> list[Draft | None]:
        """A draft for each request whose only token without context is its last one; None for the others."""
        drafts: list[Draft | None] = [None] * len(requests)
        ready = [i for i, request in enumerate(requests) if request.unseen == 1]
        if ready:
            asked = [requests[i] for i in ready]
            hid = self.block([r.tokens[-1] for r in asked], *self.places(asked, [holdings[i] for i in ready]))
            for i, made in zip(ready, self.choose(hid, asked)):
                drafts[i] = made
        return drafts

    def forget(self, request: Request) -> None:
        """Drop the salt of a request."""
        self._salts.pop(request, None)

    def places(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> tuple[Tensor, Tensor]:
        """(seen [R], page table [R, P]) of requests."""
        device, width = self.draft.place.device, max(len(h.pages) for h in holdings)
        table = array("q", bytes(8 * len(holdings) * width))
        for i, holding in enumerate(holdings):
            table[i * width : i * width + len(holding.pages)] = holding.pages
        seen = torch.tensor([r.seen for r in requests], dtype=torch.int64, device=device)
        return seen, torch.frombuffer(table, dtype=torch.int64).view(-1, width).to(device)

    def block(self, anchors: Sequence[int], seen: Tensor, table: Tensor) -> Tensor:
        """One pass over a block for each anchor token at position seen [R], table [R, P] -> hid [R, K, D]"""
        config, size = self.draft.config, self.num_drafts
        tokens = torch.full((len(anchors), size), config.mask_token_id, device=seen.device)
        tokens[:, 0] = torch.tensor(anchors, device=seen.device)
        positions = seen.unsqueeze(1) + torch.arange(size, device=seen.device)
        cu = torch.arange(0, tokens.numel() + 1, size, device=seen.device)

        def attend(layer: int, q: Tensor, own: Tensor) -> Tensor:
            kv_b = self.draft.layers[layer].self_attn.kv_b_proj.weight.to(q.dtype)
            pages = self.pools[layer].pages
            return torch.ops.k3.mla_attend_block(q, kv_b, pages, table, seen, cu, own, config.softmax_scale)

        embedded = self.draft.embed(tokens.flatten(), self.target)
        return self.draft.hidden(embedded, positions.flatten(), attend).view(*tokens.shape, -1)

    def choose(self, hid: Tensor, requests: Sequence[Request]) -> list[Draft | None]:
        """hid [R, K, D] -> drafts, token by token: each depends on the one before through the Markov head."""
        base, before = self.target.logits(hid), torch.tensor([r.tokens[-1] for r in requests])
        before = before.to(hid.device)
        chance = [i for i, r in enumerate(requests) if self.sampling != "greedy" and not r.params.greedy]
        drawn = torch.tensor(chance, dtype=torch.int64, device=hid.device)
        uniforms = torch.tensor([self.uniforms(requests[i]) for i in chance], dtype=torch.float64)
        uniforms = uniforms.view(len(chance), hid.shape[1]).to(hid.device)
        heat = [[max(requests[i].params.temperature, 1e-30)] for i in chance]
        heat = torch.tensor(heat, dtype=acc(base.dtype), device=hid.device)  # [chance, 1]
        tokens, markovs, probs = [], [], []
        for k in range(hid.shape[1]):
            markovs.append(self.draft.markov(before))
            logits = self.draft.logits(base[:, k], markovs[-1])
            before = logits.argmax(-1)
            if chance:
                scores = logits[drawn]
                probs.append(((scores - scores.amax(-1, keepdim=True)) / heat).softmax(-1))
                before = before.index_copy(0, drawn, pick(probs[-1], uniforms[:, k]))
            tokens.append(before)
        confidence = torch.sigmoid(self.draft.confidence(hid, torch.stack(markovs, 1)))
        finite = torch.isfinite(hid).flatten(1).all(1)
        own = dict(zip(chance, torch.stack(probs, 1))) if chance else {}
        columns = torch.stack(tokens, 1).tolist(), confidence, finite.tolist()
        return [self.made(*one, own.get(i)) for i, one in enumerate(zip(*columns))]

    def made(self, tokens: list[int], confidence: Tensor, finite: bool, probs: Tensor | None) -> Draft | None:
        """A draft, or None where the numbers were none: it must never cost a request its answer."""
        if finite:
            return Draft(tokens, probs, confidence)
        if not self.broken:
            log.warning("the draft model's numbers are not finite; such drafts are thrown away")
        self.broken += 1
        return None

    def uniforms(self, request: Request) -> list[float]:
        """K numbers in [0, 1) for the block at the request's present position.

        They hang on the request's seed, salted so that they have nothing to do with the verifier's, and on
        the position, so that neither company nor preemption changes a draft. No other block has the same.
        """
        salt = self._salts.get(request)
        if salt is None:
            seed = request.params.seed
            salt = secrets.token_bytes(16) if seed is None else f"seed {seed}".encode()
            self._salts[request] = salt
        digest = hashlib.blake2b(salt + b" draft %d" % request.seen, digest_size=16).digest()
        source = random.Random(digest)
        return [source.random() for _ in range(self.num_drafts)]

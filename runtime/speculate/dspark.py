"""Drafts by DSpark: after each forward its taps become context rows, before the next one blocks are drafted.

forward -> taps -> context rows        dspark_block.py, on every rank
requests that decode -> a block each   dspark_block.py, on every rank
block -> tokens, drawn one by one      here, on rank 0 alone
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

from ..cache.pools import MlaPools
from ..model import Model
from ..request import Request
from ..sampler import pick
from ..step import Step
from .draft import Draft
from .dspark_block import Block, DraftBlocks
from .dspark_model import DSparkModel

if TYPE_CHECKING:
    from ..cache.holding import Holding
    from ..executor import Executor

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
        self.blocks = DraftBlocks(draft, target, pools, num_drafts)
        self.run_block = self.blocks.run  # of this rank alone; see through
        self.draft, self.pools = draft, self.blocks.pools
        self.num_drafts, self.sampling = num_drafts, sampling
        self.broken = 0  # drafts that were not finite and were thrown away
        self._salts: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()

    def through(self, executor: Executor) -> None:
        """Let ``executor`` run the blocks, which on several ranks takes them all."""
        self.run_block = executor.draft

    def observe(self, step: Step, taps: Tensor) -> None:
        """Write the context rows of all rows of a step; ``taps`` [n, T, D]."""
        self.blocks.observe(step, taps)

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> list[Draft | None]:
        """A draft for each request whose only token without context is its last one; None for the others."""
        drafts: list[Draft | None] = [None] * len(requests)
        ready = [i for i, request in enumerate(requests) if request.unseen == 1]
        if ready:
            asked = [requests[i] for i in ready]
            block = self.run_block(*self.places(asked, [holdings[i] for i in ready]))
            for i, made in zip(ready, self.choose(block, asked)):
                drafts[i] = made
        return drafts

    def forget(self, request: Request) -> None:
        """Drop the salt of a request."""
        self._salts.pop(request, None)

    def places(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> tuple[Tensor, ...]:
        """Of each request its anchor token [R], seen [R] and page table [R, P], on the CPU."""
        width = max(len(h.pages) for h in holdings)
        table = array("q", bytes(8 * len(holdings) * width))
        for i, holding in enumerate(holdings):
            table[i * width : i * width + len(holding.pages)] = holding.pages
        anchors, seen = [r.tokens[-1] for r in requests], [r.seen for r in requests]
        pages = torch.frombuffer(table, dtype=torch.int64).view(-1, width)
        return torch.tensor(anchors), torch.tensor(seen), pages

    def choose(self, block: Block, requests: Sequence[Request]) -> list[Draft | None]:
        """Drafts, token by token: each depends on the one before through the Markov head, which every rank
        has whole, so that choosing needs no other rank.
        """
        hid, base = block
        before = torch.tensor([r.tokens[-1] for r in requests], device=hid.device)
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

"""Which states get a slot of the prefix index: those that a step writes, and the last one of a request.

    plan      a chunk leaves the state at 192       slot of the request, nobody finds it
    verdict   verified rows passed 256              the same, but after the forward
    commit    seen >= 192                           the node after 192 tokens has it
              seen < 192, or another was first      the slot goes back
    decode    seen = 320, then 384, ...             one slot that moves along, unless 320 is worth keeping

A state belongs to one token count. Its node is looked up at the commit, by the tokens that are really kept.
"""

from __future__ import annotations

from collections import Counter

from ..request import Request
from .free_list import FreeList
from .hashes import Chain
from .holding import Holding, Planned
from .index import PrefixIndex
from .node import Node
from .orders import Orders
from .retention import Retention


class KeptStates:
    """The part of the books that decides about states. ``declines`` counts those that got no slot, by reason.

    pending: token counts, by key, of the prefixes whose state the step makes that was planned.
    """

    def __init__(
        self,
        index: PrefixIndex,
        slots: FreeList,
        orders: Orders,
        retention: Retention | None,
        declines: Counter[str],
    ) -> None:
        self.pending: dict[bytes, int] = {}
        self._index, self._slots, self._orders = index, slots, orders
        self.retention = retention
        self._declines = declines

    def plan(self, request: Request, holding: Holding, chain: Chain, tokens: int) -> int:
        """A slot for the state after ``tokens`` tokens, which this step writes; 0 when it shall not."""
        planned, unit = holding.planned, self.retention.grid.unit
        if planned is not None:
            assert planned.tokens == tokens, f"{request!r} already leaves a state at {planned.tokens}"
            return planned.slot
        assert tokens > request.seen, f"the state of {request!r} at {tokens} is past"
        assert tokens % unit == 0, f"no prefix of {request!r} ends at {tokens}"
        if request.unseen <= 1:  # after the forward: no order may touch the slot any more
            slot, key = self._rolling_slot(request, holding), None
        else:
            key = chain.key(tokens // unit)
            slot = self._prefill_slot(request, holding, tokens, key)
        if not slot:
            return 0
        holding.planned = Planned(tokens, slot, key)
        if key is not None:
            self.pending[key] = tokens
            self._orders.poison(slots=[slot])
        return slot

    def settle(self, request: Request, holding: Holding, chain: Chain) -> None:
        """Publish the state that the step wrote, if its tokens are kept and nobody was first."""
        planned = holding.planned
        if planned is None:
            return
        if planned.tokens <= request.seen:
            node = self._index.get(chain.key(planned.tokens // self.retention.grid.unit))
            if not node.state:
                self._forget(holding)
                self._keep(request, holding, node, planned.slot, rolling=planned.key is None)
                return
        self.drop(request, holding)

    def drop(self, request: Request, holding: Holding) -> None:
        """Give back the slot of a state that is not to be published."""
        planned = holding.planned
        if planned is not None:
            self._forget(holding)
            self._slots.give(request, [planned.slot])
            self._orders.poison(slots=[planned.slot])

    def keep_end(self, request: Request, holding: Holding, rolling: bool) -> None:
        """Copy the state that a request has at a boundary, where whoever continues its text starts."""
        node = holding.tip
        if node.state:
            self._index.touch_state(node)
        elif slot := self._rolling_slot(request, holding):
            self._orders.copy(holding.slot, slot)
            self._keep(request, holding, node, slot, rolling)

    def leave(self, request: Request, holding: Holding) -> None:
        """The request goes: nothing will replace its last state any more."""
        self.drop(request, holding)
        node, holding.rolling = holding.rolling, None
        if node is not None and node.rolling is holding:
            node.rolling = None
            self._index.tell(node)

    def _keep(self, request: Request, holding: Holding, node: Node, slot: int, rolling: bool) -> None:
        """A rolling state stays when it lies where states are kept anyway; until then it is not told of."""
        self._index.keep_state(request, node, slot)
        if rolling and not self.retention.wants(node.tokens, request.prompt_tokens, 0, holding.junction):
            holding.rolling, node.rolling = node, holding
        else:
            self._index.tell(node)

    def _prefill_slot(self, request: Request, holding: Holding, tokens: int, key: bytes) -> int:
        """A slot for a state that is wanted and that nobody has or makes."""
        total = len(request.tokens)
        if not self.retention.wants(tokens, request.prompt_tokens, total, holding.junction):
            return self._decline("not retained")
        node = self._index.get(key)
        if node is not None and node.state:
            self._index.touch_state(node)
            return self._decline("already kept")
        if key in self.pending:
            return self._decline("made by another")
        return self._take(request)

    def _rolling_slot(self, request: Request, holding: Holding) -> int:
        """A slot for the newest boundary of a decoding request: that of the boundary before, unless somebody
        went on from there.
        """
        node, holding.rolling = holding.rolling, None
        if node is not None and node.rolling is holding and not node.pins:
            self._index.lose_state(node)
        elif node is not None and node.state and node.rolling in (None, holding):
            node.rolling = None
            self._index.tell(node)
        return self._take(request)

    def _take(self, request: Request) -> int:
        if not len(self._slots) and not self._index.evict_state():
            return self._decline("no checkpoint slot")
        return self._slots.take(request, 1)[0]

    def _forget(self, holding: Holding) -> None:
        if holding.planned is not None and holding.planned.key is not None:
            del self.pending[holding.planned.key]
        holding.planned = None

    def _decline(self, reason: str) -> int:
        self._declines[reason] += 1
        return 0

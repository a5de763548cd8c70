"""What a request owns while it runs, and what it found in the prefix index."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from .node import Node


class Hit(NamedTuple):
    """The longest prefix of a request that need not be run: latents and state end at the same token count.

    tokens: that count. matched: where the latents alone would end. node: of the prefix, None without one.
    """

    tokens: int = 0
    matched: int = 0
    node: Node | None = None

    @property
    def junction(self) -> int:
        """Token count up to which another request had the same tokens, while no state was kept there; 0 where
        there is nothing to make up for.
        """
        return self.matched if self.matched > self.tokens else 0


NO_HIT = Hit()


class Planned(NamedTuple):
    """A checkpoint that this step writes. It belongs to the request until the step is committed.

    key: of a prefill's prefix. None where the request decodes: its last tokens are not its own yet.
    """

    tokens: int
    slot: int
    key: bytes | None


@dataclass(slots=True, eq=False)
class Holding:
    """What a running request owns.

    slot: where its state is; whoever moves the state to another of ``slots`` says so here. slots: all that
    are its own. pages: int64 ids in token order, those of the prefix index first; grows in place.
    """

    slot: int
    slots: list[int]
    pages: array
    tip: Node | None = None  # the last block in the index of what it has run; keeps all before it there
    blocks: int = 0  # up to the tip
    junction: int = 0
    planned: Planned | None = None
    rolling: Node | None = None  # has the state of its last boundary

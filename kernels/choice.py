"""What computes an op that is called outside of any graph: what lowering would choose for it inside one.

commits of states, blocks of drafts     Chosen(lower)(name, *args)      where a forward is compiled
                                        by_meaning(name, *args)         where it is not
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .op import OPS, Op

log = logging.getLogger(__name__)
Compute = Callable[..., Any]  # (name of an op, *its arguments) -> its results
MEANING, OPEN = "meaning", "open"  # outside of a graph there is nothing to open an op into


def by_meaning(name: str, *args: Any) -> Any:
    """The op ``name`` of ``args``, by its meaning."""
    return getattr(torch.ops.k3, name)(*args)


class Chosen:
    """Computes ops by the first of their implementations that has no objection to the arguments.

    lower: op -> provider, as a user names them. said: of each op that was called, what computes it and why,
    in the words of a report; logged when it changes.
    """

    def __init__(self, lower: Mapping[str, str]) -> None:
        self.lower = lower
        self.said: dict[str, str] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        """The op ``name`` of ``args``. Raises ValueError where what the user named cannot compute it."""
        op, packet = OPS[name], getattr(torch.ops.k3, name)
        objections = {n: i.objection(*args) for n, i in op.implementations.items() if not i.asked_for}
        choice = self.choose(op, objections, args)
        self.say(op, choice, objections)
        return (packet.default if choice == MEANING else getattr(packet, choice))(*args)

    def choose(self, op: Op, objections: Mapping[str, str | None], args: tuple) -> str:
        """The name of an implementation, or ``meaning``."""
        wanted = self.lower.get(op.name)
        if wanted is None:
            return next((name for name, why in objections.items() if why is None), MEANING)
        if wanted in (MEANING, OPEN):
            return MEANING
        if why := op.implementations[wanted].objection(*args):
            raise ValueError(f"lower={{{op.name!r}: {wanted!r}}} cannot be obeyed outside the layers: {why}")
        return wanted

    def say(self, op: Op, choice: str, objections: Mapping[str, str | None]) -> None:
        """Keep what computes ``op``."""
        if choice == MEANING:
            said = "; ".join(
                ["computed by its meaning", *(f"{n}: {why}" for n, why in objections.items() if why)]
            )
        else:
            note = op.implementations[choice].note
            said = f"computed by {choice}{f', {note}' if note else ''}"
        if self.said.get(op.name) != said:
            log.info("k3.%s outside the layers: %s", op.name, said)
            self.said[op.name] = said

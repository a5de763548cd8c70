"""Where this rank stands among those that share the rows of a context, as data and not as a constant.

    token     0 1 2 3 4 5 6 7 8 ..      4 ranks, an interleave of 1
    rank      0 1 2 3 0 1 2 3 0 ..      and of 2:   0 0 1 1 2 2 3 3 0 ..

    place = (rank, ranks, interleave)   token p is of rank p // interleave mod ranks

A graph that asks the op ``k3.context_place`` is the same on every rank, and so is what a compiler keeps of
it; only the answer differs. A rank's own tokens, one after the other, are an ordinary context: of the L first
tokens of a request it has ``local_length(L)``, and a page of B tokens is one of B // ranks rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .op import LIBRARY, NAMESPACE, unseen_by_dynamo


def context_place(group: str, interleave: int) -> Tensor:
    """[3] int64 on the CPU: this rank in the process group ``group``, its size, and ``interleave``, the
    neighbouring tokens that stay together.
    """
    ranks = _resolve_process_group(group)
    return torch.tensor([ranks.rank(), ranks.size(), interleave])


def fake(group: str, interleave: int) -> Tensor:
    return torch.empty(3, dtype=torch.int64)


# Not an Op: it has no meaning that another way to compute it would have to equal.
LIBRARY.define("context_place(str group, int interleave) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.impl("context_place", unseen_by_dynamo(context_place), "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::context_place", fake, lib=LIBRARY)


def owner(position: Tensor, place: Tensor) -> Tensor:
    """The rank that holds a token, by its place in the text."""
    _, ranks, together = place.unbind()
    return position // together % ranks


def local_length(length: Tensor, place: Tensor) -> Tensor:
    """How many of the first ``length`` tokens of a text are this rank's."""
    rank, ranks, together = place.unbind()
    turn = ranks * together  # tokens after which it is this rank's turn again
    rest = (length % turn - rank * together).clamp(min=0)
    return length // turn * together + torch.minimum(rest, together)


def local_index(position: Tensor, place: Tensor) -> Tensor:
    """The place of a token among those of the rank that holds it."""
    _, ranks, together = place.unbind()
    return position // (ranks * together) * together + position % together

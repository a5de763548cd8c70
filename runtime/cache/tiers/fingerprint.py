"""Who may read what was stored: the same weights, configuration, layout of pools and format, and nobody else.

A state is meaningless under other weights, and nothing in its shape would tell. Every bit of every weight
goes into a sum, and pieces of each go into a hash in their order: that takes one pass over memory, where a
hash of a large model takes minutes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from .disk_file import FORMAT

PIECES, PIECE_BYTES = 16, 4096
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # element bytes -> whole numbers


def fingerprint(weights: Iterable[tuple[str, Tensor]], config: object, geometry: str, extra: str = "") -> str:
    """Hex name of a model and how it is served.

    weights: name and tensor, as named_parameters() gives them. config: a dataclass or a namespace of
    settings. geometry: PoolIO.geometry. extra: anything else that a reader must share, such as a rank.
    """
    made = hashlib.sha256(f"{FORMAT}\n{geometry}\n{described(config)}\n{extra}\n".encode())
    for name, tensor in weights:
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {bit_sum(tensor)}\n".encode())
        for piece in pieces(tensor):
            made.update(piece)
    return made.hexdigest()


def described(config: object) -> str:
    """The same text for the same settings, whatever order they were given in."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return json.dumps(dataclasses.asdict(config), sort_keys=True, default=repr)
    return (
        json.dumps(vars(config), sort_keys=True, default=repr)
        if hasattr(config, "__dict__")
        else repr(config)
    )


def words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers [n]."""
    return tensor.detach().contiguous().view(-1).view(WORD[tensor.element_size()])


def bit_sum(tensor: Tensor) -> int:
    """Sum of the tensor's words modulo 2**64: one changed bit changes it."""
    return int(words(tensor).sum(dtype=torch.int64)) if tensor.numel() else 0


def pieces(tensor: Tensor) -> Iterable[bytes]:
    """Evenly spaced pieces, the first and the last bytes among them; all of a small tensor."""
    flat = words(tensor)
    length = PIECE_BYTES // flat.element_size()
    if flat.numel() <= PIECES * length:
        yield flat.cpu().numpy().tobytes()
        return
    for i in range(PIECES):
        start = i * (flat.numel() - length) // (PIECES - 1)
        yield flat[start : start + length].cpu().numpy().tobytes()

"""The part of a filled model or draft that one rank holds, and a count of the collectives that are made.

``part(whole, world())`` inside ``on_threads`` shares a model among its threads.
"""

from __future__ import annotations

from collections import Counter

from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks
from k3compile.runtime.parallel.sharding import DRAFT, TARGET, part_of, split_of
from k3compile.runtime.speculate.dspark_model import DSparkModel
from torch.utils._python_dispatch import TorchDispatchMode


def part(whole: Model | DSparkModel, ranks: Ranks) -> Model | DSparkModel:
    """A rank's part of a filled model, or of a filled draft."""
    if isinstance(whole, DSparkModel):
        own, table = DSparkModel(whole.config, whole.place.dtype, ranks=ranks), DRAFT
    else:
        options = {"tap_layers": whole.tap_layers, "state_replay": whole.state_replay}
        own, table = Model(whole.config, whole.place.dtype, ranks=ranks, **options), TARGET
    full = dict(whole.named_parameters())
    for name, parameter in own.named_parameters():
        parameter.copy_(part_of(full[name], split_of(table, name), ranks))
    return own


class Collectives(TorchDispatchMode):
    """Number and bytes of collectives, by what they are and how wide their rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("_c10d_functional::")
        if name != func.name() and name != "wait_tensor":
            self.number[name, args[0].shape[-1]] += 1
            self.bytes[name] += args[0].numel() * args[0].element_size()
        return out

"""An op that writes its second argument last row first: where memory is shared it reads its own writes."""

import torch

LIBRARY = torch.library.Library("k3test", "DEF")


def reverse_into(source: torch.Tensor, target: torch.Tensor) -> None:
    for row in range(source.shape[0]):
        target[source.shape[0] - 1 - row] = source[row]


LIBRARY.define("rev_into(Tensor source, Tensor(a!) target) -> ()")
LIBRARY.impl("rev_into", reverse_into, "CompositeExplicitAutograd")
torch.library.register_fake("k3test::rev_into", lambda source, target: None, lib=LIBRARY)

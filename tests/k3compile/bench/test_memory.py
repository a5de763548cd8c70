"""The peak is the peak of the block, not of the process."""

import torch

from k3compile.bench.memory import peak_since

SIZE = 64 << 20


def test_memory_that_was_freed_still_counts_and_what_came_before_does_not():
    torch.ones(4 * SIZE, dtype=torch.uint8)
    with peak_since() as before:
        pass
    with peak_since() as peak:
        torch.ones(SIZE, dtype=torch.uint8)
    with peak_since() as after:
        pass
    assert SIZE * 0.9 < peak.bytes - before.bytes < SIZE * 1.5
    assert after.bytes < peak.bytes - SIZE * 0.9

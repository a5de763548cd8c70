"""Lesson 1: a gather that reads a range becomes a view, and the report says why that is allowed."""

import torch

from k3compile import report


def two_classes(x, sizes):
    """Scale the first rows by 2 and the others by 3, the way a mixed batch is split: by index."""
    first = sizes[0].item()
    torch._check(first >= 0)
    torch._check(first <= x.shape[0])
    head = torch.arange(first)
    tail = torch.arange(first, x.shape[0])
    out = torch.empty_like(x)
    out.index_copy_(0, head, x.index_select(0, head) * 2)
    out.index_copy_(0, tail, x.index_select(0, tail) * 3)
    return out


compiled = torch.compile(two_classes, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
with torch.no_grad():
    for rows in (3, 0, 8):  # the split moves, and nothing compiles again
        x = torch.randn(8, 4)
        sizes = torch.tensor([rows, 8 - rows])
        assert torch.equal(compiled(x, sizes), two_classes(x, sizes))

print(report.latest().text())
print(f"index operations: 4 -> {4 - report.latest().applied('contiguous_views')}")

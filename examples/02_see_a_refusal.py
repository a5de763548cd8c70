"""Lesson 2: without the fact that makes it legal a rewrite is refused, and the report says which fact."""

import torch

from k3compile import report


def unchecked(x, sizes):
    """The end of the range is a number from the host that nothing bounds."""
    rows = torch.arange(sizes[0].item())
    return x.index_select(0, rows) * 2


compiled = torch.compile(unchecked, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
with torch.no_grad():
    compiled(torch.randn(8, 4), torch.tensor([3]))

for remark in report.latest().remarks:
    print(f"{remark.kind}: {remark.node}: {remark.reason}")
    print(f"  at   {remark.source}")
    print(f"  try  {remark.fix_it}")
assert report.latest().applied("contiguous_views") == 0

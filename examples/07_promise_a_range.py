"""Lesson 7: an index that is an input cannot be proven; a promise picks the fast body at each call."""

import torch

import k3compile
from k3compile import report


def rows_of(x, index):
    return x.index_select(0, index) * 2


compiled = torch.compile(rows_of, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
x = torch.randn(8, 4)
promised = k3compile.annotate_range(torch.arange(2, 5), 2, 5)
with torch.no_grad():
    assert torch.equal(compiled(x, promised), x[2:5] * 2)  # a view: nothing is gathered
    shuffled = torch.tensor([4, 2, 3])
    assert torch.equal(compiled(x, shuffled), x[shuffled] * 2)  # no promise: the other body, same graph
    promised[0] = 7  # the promise is void from here on
    assert torch.equal(compiled(x, promised), x[promised] * 2)

print(report.latest().text())
print(f"graphs: {len(report.all())}")

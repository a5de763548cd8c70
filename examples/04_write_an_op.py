"""Lesson 4: an op is its meaning in plain torch; under Inductor it is opened, so that it costs nothing."""

import torch
from k3compile.kernels.op import op
from torch import Tensor

from k3compile import report


@op()
def unit_rows(x: Tensor, scale: float) -> Tensor:
    """x [T, D] -> scale x / |x| per row, the sum kept in float32."""
    return (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True)) * scale).to(x.dtype)


@unit_rows.fake
def _(x, scale):
    return torch.empty_like(x)


@unit_rows.samples
def _(dtype):
    yield torch.randn(3, 8, dtype=dtype), 2.0


def forward(x):
    return torch.ops.k3.unit_rows(x, 2.0) + 1


for args in unit_rows.each_sample(torch.float32):  # torch's own check of schema, fake and tracing
    torch.library.opcheck(unit_rows.overload, args)
with torch.no_grad():
    x = torch.randn(5, 8)
    compiled = torch.compile(forward, backend="k3", options={"inner": "aot_eager"})
    torch.testing.assert_close(compiled(x), forward(x))
print(report.latest().choices)  # "opened" where the inner compiler fuses; aot_eager, quick to start, does not

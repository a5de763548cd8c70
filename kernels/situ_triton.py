"""SiTU in Triton: both halves of a fused projection are read where they are.

tanh has no instruction that every target shares:   1 - 2 / (exp(2 |x|) + 1)
and below 0.625, where that cancels:                 x + x^3 times a polynomial of x^2
"""

from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, tl, wrong_dtype
from .situ import situ

COLUMNS = 1024


@jit
def tanh(x):
    """Within 1.8 units of the last place. The coefficients make the largest relative error below 0.625
    smallest; it is 4e-9.
    """
    size, square = tl.abs(x), x * x
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    series = 0.02065058672306396 + square * -0.005717044448518509
    series = 0.13331491284629982 + square * (-0.05374349789501621 + square * series)
    series = -0.33333283925192897 + square * series
    return tl.where(size < 0.625, x + x * square * series, far)


@jit
def situ_of(gate, up, beta, linear_beta, CAPPED: tl.constexpr):
    """The activation of float32 values; not capped it is silu(gate) * up. Divided once: a product with the
    sigmoid would round once more.
    """
    if CAPPED:
        product = tanh(gate / beta) * beta * (tanh(up / linear_beta) * linear_beta)
    else:
        product = gate * up
    return product / (1.0 + tl.exp(-gate))


@jit
def situ_kernel(
    gate, up, y, gate_row, up_row, I, beta, linear_beta, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < I
    g = tl.load(gate + row * gate_row + col, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=live, other=0.0).to(tl.float32)
    result = situ_of(g, u, beta, linear_beta, CAPPED)
    tl.store(y + row * I + col, result.to(y.dtype.element_ty), mask=live)


def objection(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> str | None:
    return no_gpu(gate, up) or first_objection(wrong_dtype(gate, up), not_rows(gate=gate, up=up))


@situ.impl("triton", objection=objection)
def situ_triton(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """As the meaning, one rounding."""
    y = gate.new_empty(gate.shape)
    gates, ups = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
    grid = (gates.shape[0], blocks(gates.shape[1], COLUMNS))
    args = (gates, ups, y, gates.stride(0), ups.stride(0), gates.shape[1], beta, linear_beta)
    launch(situ_kernel, grid, *args, CAPPED=beta != 0.0, BLOCK=COLUMNS)
    return y

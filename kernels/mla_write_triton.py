"""Put this step's latents into their pages, in Triton: a program sixteen token rows and 64 columns.

    token t of row r  --table[r, (seen + place) // B]-->  row (seen + place) % B of a page

T token rows, R requests, N pages of B tokens.
"""

from torch import Tensor

from .conv_triton import owner_of
from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, tl, wrong_dtype
from .mla import mla_write

TILE = {"BT": 16, "BC": 64}


@jit
def write_kernel(
    latent, pages, table, seen, cu, latent_row, page_step, page_row, table_row, T, R, B, W,
    STEPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token, col = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    row = owner_of(token, cu, R, STEPS)
    owned = (row < R) & (token < T)
    row = row.to(tl.int64)
    at = token - tl.load(cu + row, mask=owned, other=0) + tl.load(seen + row, mask=owned, other=0)
    page = tl.load(table + row * table_row + at // B, mask=owned, other=0).to(tl.int64)
    live = owned[:, None] & (col < W)[None, :]
    own = tl.load(latent + token.to(tl.int64)[:, None] * latent_row + col[None, :], mask=live, other=0.0)
    put = pages + page[:, None] * page_step + (at % B).to(tl.int64)[:, None] * page_row + col[None, :]
    tl.store(put, own.to(pages.dtype.element_ty), mask=live)


def objection(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> str | None:
    """Why these arguments are not for here, or None."""
    return no_gpu(latent, pages, table, seen, cu) or first_objection(
        wrong_dtype(latent, pages),
        not_rows(latent=latent, pages=pages),
        None if table.stride(1) == 1 else "the pages of a request are not side by side",
    )


@mla_write.impl("triton", objection=objection)
def mla_write_triton(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    """As the meaning. A token row of nobody is written nowhere."""
    (tokens, width), requests = latent.shape, table.shape[0]
    launch(
        write_kernel, (blocks(tokens, TILE["BT"]), blocks(width, TILE["BC"])),
        latent, pages, table, seen, cu,
        latent.stride(0), *pages.stride()[:2], table.stride(0), tokens, requests, pages.shape[1], width,
        STEPS=requests.bit_length(), **TILE,
    )  # fmt: skip

"""New latent rows into their pages in C++ on a CPU; cpu/mla_write.cpp copies them."""

from __future__ import annotations

from torch import Tensor

from .mla import mla_write
from .native import entry, left_to_meaning, longs, unavailable


def objection(latent, pages, table, seen, cu) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if latent.device.type != "cpu":
        return f"{latent.device.type} tensors"
    if latent.dtype != pages.dtype:
        return f"rows are {latent.dtype} and pages {pages.dtype}: rounding is left to torch"
    if latent.stride(-1) != 1 or pages.stride(-1) != 1:
        return "channels of the rows or of pages are not side by side"
    return unavailable("mla_write")


@mla_write.impl("native", objection=objection, note="C++ that was compiled here", by_address=True)
def write_native(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    """As the meaning, bit for bit."""
    if left_to_meaning("mla_write"):
        return mla_write.meaning(latent, pages, table, seen, cu)
    table, seen, cu = longs(table), longs(seen), longs(cu)
    size, (page, page_row, _) = pages.element_size(), pages.stride()
    entry("mla_write", "k3_mla_write", "12q")(
        latent.data_ptr(),
        pages.data_ptr(),
        table.data_ptr(),
        seen.data_ptr(),
        cu.data_ptr(),
        table.shape[0],
        latent.shape[1] * size,
        pages.shape[1],
        latent.stride()[0] * size,
        page * size,
        page_row * size,
        table.shape[1],
    )

"""Few queries a row over pages of latents in C++ on a CPU, kv_b taken into them; cpu/mla.cpp has the picture.

    tokens of a request     [ in pages | own rows ]     a query sees the first so many of them
    queries of a request    in pieces of a few, which are held beside each other

What mla_attend, mla_attend_block and mla_attend_shard have in common. Lengths and page tables are read by
the kernel alone, so its call can be made again for others. T token rows, R requests, H heads, L latent, N
pages of B tokens; n and r key widths without and with position, v value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import address, best_isa, entry, longs, threads, unavailable

LANES = 16  # that a vector may have
NOTE = "C++ that was compiled here"


def objection(given: tuple[Tensor, ...], kv_b: Tensor | None, pages: Tensor, latent: int) -> str | None:
    """Why nothing here is for ``given``, kv_b and pages, or None; the first answer compiles the kernel."""
    if pages.device.type != "cpu":
        return f"{pages.device.type} tensors"
    if wrong := sorted({str(t.dtype) for t in (*given, pages)} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if kv_b is not None and kv_b.dtype not in (torch.float32, torch.bfloat16):
        return f"kv_b is {kv_b.dtype}, not float32 or bfloat16"
    if latent % LANES:
        return f"latents of {latent} channels, not a multiple of {LANES}"
    if pages.stride(2) != 1 or (kv_b is not None and kv_b.stride(1) != 1):
        return "channels of kv_b or of pages are not side by side"
    return "vectors of four lanes gain nothing" if best_isa() == "portable" else unavailable("mla")


def attend_few(
    q: Tensor,
    kv_b: Tensor | None,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    scale: float,
    out: Tensor,
    own: Tensor | None = None,
    lse: Tensor | None = None,
    place: Tensor | None = None,
    divided: bool = False,
    isa: str | None = None,
) -> None:
    """Attention of every request's queries, of which there may be many, to what they see.

    q [T, H, n+r] with kv_b [H*(n+v), L] to out(a!) [T, H, v]; or absorbed queries [T, H, L+r] without it to
    out [T, H, L] and lse(a!) [H, T]. Channels of out and lse are side by side. own [T, L+r]: rows that are in
    no page and seen by their whole block. place [3]: this rank's tokens are in pages, and no others. divided:
    requests that are mla_prefill_native's are left alone. Token rows past cu[-1] become zero, lse -inf.
    isa: default this CPU's best. Raises ValueError for a request that needs more pages than the table has.
    """
    q = q if q.stride()[2] == 1 else q.contiguous()
    if own is not None and own.stride()[1] != 1:
        own = own.contiguous()
    table, seen, cu, place = longs(table), longs(seen), longs(cu), None if place is None else longs(place)
    (tokens, heads, width), (requests, columns), (_, size, row) = q.shape, table.shape, pages.shape
    latent, value = (out.shape[2], 0) if kv_b is None else (kv_b.shape[1], out.shape[2])
    rope = row - latent
    check(
        entry("mla", "k3_mla_attend", "30qdq", isa)(
            *(address(t) for t in (q, out, kv_b, pages, own, lse, table, seen, cu, place)),
            *(requests, tokens, heads, 0 if kv_b is None else width - rope, rope, latent, value),
            *q.stride()[:2],
            *out.stride()[:2],
            0 if kv_b is None else kv_b.stride()[0],
            *pages.stride()[:2],
            0 if own is None else own.stride()[0],
            0 if lse is None else lse.stride()[0],
            size,
            columns,
            kv_b is not None and kv_b.dtype is torch.bfloat16,
            divided,
            scale,
            threads(),
        ),
        columns * size,
    )


def check(wrong: int, held: int) -> None:
    """Raise if a kernel refused a request: ``wrong`` is one more than its number, or 0."""
    if wrong:
        raise ValueError(f"request {wrong - 1} has more tokens than the {held} that its row of pages holds")

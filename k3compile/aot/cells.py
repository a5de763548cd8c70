"""What is compiled: calls of ops at the released model's sizes on one of eight ranks, without data.

    decode    24 requests of a token each           prefill    8184 token rows of 24 requests
    verify    24 requests of eight tokens           chunk      2040 token rows of 24 requests

No count is a multiple of 16, so that nothing is compiled that only such counts would get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import Launch, recording

from .parts import PARTS

REQUESTS, CHUNK, ROWS, SLOTS = 24, 2040, 8184, 1000
WIDTH, LATENT, HEADS, HEAD, INNER = 7168, 3584, 12, 128, 768
CHANNELS, SNAPSHOTS, EXPERTS, TOP_K, EXPERT_INNER = 3 * HEADS * HEAD, 7, 896, 16, 384
BF16, FP32, LONG = torch.bfloat16, torch.float32, torch.int64


@dataclass(frozen=True)
class Cell:
    """A call: its arguments, the bytes it has to move and the operations it has to make.

    kind: whose peak the operations are held against. needs: target -> instruction that has to be there.
    provider: the implementation. targets: the parts it is for.
    """

    op: str
    case: str
    args: Callable[[], tuple]
    num_bytes: int
    flops: int
    kind: str = "bf16"
    needs: tuple[tuple[str, str], ...] = ()
    provider: str = "triton"
    targets: tuple[str, ...] = tuple(PARTS)

    @property
    def name(self) -> str:
        """``op@case``, with what else than Triton's name the provider has."""
        return f"{self.op}{self.provider.removeprefix('triton')}@{self.case}"

    def launches(self, target: str) -> list[Launch]:
        """What the implementation launches on ``target``."""
        with recording(target) as made:
            OPS[self.op].implementations[self.provider].fn(*self.args())
        return made.launches


def bare(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def part_of(rows: int, width: int, whole: int) -> Tensor:
    """Columns of a wider row: what a fused projection leaves."""
    return bare(rows, whole)[:, :width]


def gains(*widths: int) -> list[Tensor]:
    return [bare(width) for width in widths]


def row_ops(case: str, tokens: int) -> list[Cell]:
    """Ops a token at a time."""
    row, n = tokens * WIDTH * 2, tokens * WIDTH
    bank = (bare(tokens, WIDTH), bare(SNAPSHOTS, tokens, WIDTH), *gains(WIDTH, WIDTH), 1e-5)
    both = (lambda: bare(tokens, 2 * INNER)[:, :INNER], lambda: bare(tokens, 2 * INNER)[:, INNER:])
    head = lambda: bare(tokens, HEADS, HEAD)  # noqa: E731
    gated = lambda: (head(), part_of(tokens, HEADS * HEAD, 4096).view(-1, HEADS, HEAD))  # noqa: E731
    heads = tokens * HEADS * HEAD * 2
    mixed = (SNAPSHOTS + 3) * row
    return [
        Cell("rms_norm", case, lambda: (bare(tokens, WIDTH), *gains(WIDTH), 1e-5), 2 * row, 4 * n),
        Cell(
            "add_rms_norm", case,
            lambda: (bare(tokens, WIDTH), bare(tokens, WIDTH), *gains(WIDTH), 1e-5), 4 * row, 5 * n,
        ),
        Cell("mix_rms_norm", case, lambda: (*bank, *gains(WIDTH), 1e-5), mixed - row, 40 * n),
        Cell(
            "add_mix_rms_norm", case,
            lambda: (bank[0], bare(tokens, WIDTH), *bank[1:], *gains(WIDTH), 1e-5), mixed + row, 41 * n,
        ),
        Cell(
            "situ", case, lambda: (both[0](), both[1](), 4.0, 25.0), 3 * tokens * INNER * 2,
            30 * tokens * INNER,
        ),
        Cell("l2_norm", case, lambda: (head(), HEAD**-0.5), 2 * heads, 3 * tokens * HEADS * HEAD),
        Cell(
            "gated_rms_norm", case, lambda: (*gated(), bare(HEAD, dtype=FP32), 1e-5), 3 * heads,
            10 * tokens * HEADS * HEAD,
        ),
    ]  # fmt: skip


def conv_args(tokens: int, *more: Any) -> tuple:
    window, slots = bare(SLOTS, 3, CHANNELS), bare(REQUESTS, dtype=LONG)
    taps = bare(CHANNELS, 4, dtype=FP32)
    return (
        part_of(tokens, CHANNELS, 2 * CHANNELS), taps, window, slots, bare(REQUESTS + 1, dtype=LONG), *more,
    )  # fmt: skip


def conv_ops() -> list[Cell]:
    """The short convolution, with what it leaves behind. left: rows it writes besides its outputs."""
    cells, windows = [], 3 * REQUESTS
    offsets = lambda: bare(64, dtype=torch.int32)  # noqa: E731
    pool = lambda: (offsets(), bare(2, 64, 3, CHANNELS), 1)  # noqa: E731
    drafts, targets = 8 * REQUESTS, lambda: bare(REQUESTS, 8, dtype=LONG)
    for op, case, tokens, left, args in (
        ("short_conv", "decode", REQUESTS, windows, partial(conv_args, REQUESTS)),
        ("short_conv", "prefill", ROWS, windows, partial(conv_args, ROWS)),
        ("short_conv_export", "prefill", ROWS, windows, lambda: conv_args(ROWS, offsets(), offsets())),
        ("short_conv_verify", "verify", drafts, drafts, lambda: conv_args(drafts, bare(SLOTS, 8, CHANNELS))),
        ("short_conv_verify_states", "verify", drafts, 3 * drafts, lambda: conv_args(drafts, targets())),
        ("conv_scan", "decode", REQUESTS, windows, partial(turned_args, 1)),
        ("conv_scan", "prefill", ROWS, windows, conv_scan_args),
        ("conv_scan", "later", ROWS, windows, partial(turned_args, ROWS // REQUESTS)),
        ("conv_scan_export", "prefill", ROWS, windows, lambda: conv_scan_args(*pool())),
    ):
        moved = 2 * tokens + windows + left
        cells.append(Cell(op, case, args, CHANNELS * (2 * moved + 16), 12 * tokens * CHANNELS))
    return cells


def conv_scan_args(*more: Any) -> tuple:
    """The rows of a prompt as sequences of one length, their windows, and what an op takes besides."""
    x = bare(REQUESTS, ROWS // REQUESTS, 2 * CHANNELS)[..., :CHANNELS]
    return x, bare(CHANNELS, 4, dtype=FP32), bare(REQUESTS, 3, CHANNELS), *more


def turned_args(tokens: int) -> tuple:
    """What an adopted model hands over behind its cache, which has four tokens of a channel side by side."""
    cache, taps = bare(REQUESTS, CHANNELS, 4), bare(CHANNELS, 4, dtype=FP32)
    strip = bare(REQUESTS, CHANNELS, 4 + tokens).mT
    return bare(REQUESTS, tokens, CHANNELS) if tokens == 1 else strip[:, 4:], taps, cache.mT[:, 1:]


def kda_decode_args() -> tuple:
    inner = HEADS * HEAD
    fused = bare(REQUESTS, CHANNELS + 2 * inner)
    f, gate = fused[:, CHANNELS : CHANNELS + inner], fused[:, CHANNELS + inner :]
    return (
        fused[:, :CHANNELS], bare(CHANNELS, 4, dtype=FP32), f.view(-1, HEADS, HEAD), bare(REQUESTS, HEADS),
        gate.view(-1, HEADS, HEAD), bare(HEADS, dtype=FP32), bare(inner, dtype=FP32), bare(HEAD, dtype=FP32),
        bare(SLOTS, 3, CHANNELS), bare(SLOTS, HEADS, HEAD, HEAD, dtype=FP32), bare(REQUESTS, dtype=LONG),
        -5.0, 1e-5,
    )  # fmt: skip


def kda_args(tokens: int, *more: Any) -> tuple:
    """q, k and v out of one buffer, their states, and what an op takes besides."""
    q, k, v = (bare(tokens, 3, HEADS, HEAD)[:, i] for i in range(3))
    g, beta = bare(tokens, HEADS, HEAD, dtype=FP32), bare(tokens, HEADS, dtype=FP32)
    state = bare(SLOTS, HEADS, HEAD, HEAD, dtype=FP32)
    return q, k, v, g, beta, state, bare(REQUESTS, dtype=LONG), bare(REQUESTS + 1, dtype=LONG), *more


def scan_args(*more: Any) -> tuple:
    """The same rows as sequences of one length, a state handed in, and what an op takes besides."""
    tokens = ROWS // REQUESTS
    q, k, v = (bare(REQUESTS, tokens, 3, HEADS, HEAD)[:, :, i] for i in range(3))
    g, beta = (bare(REQUESTS, tokens, HEADS, *last, dtype=FP32) for last in ((HEAD,), ()))
    return q, k, v, g, beta, bare(REQUESTS, HEADS, HEAD, HEAD, dtype=FP32), *more


def kda_records(*layers: int) -> tuple[Tensor, Tensor, Tensor]:
    """What eight rows of drafts leave in each slot: corrections, keys and log decays."""
    shape = (*layers, SLOTS, 8, HEADS, HEAD)
    return bare(*shape, dtype=FP32), bare(*shape), bare(*shape, dtype=FP32)


def kda_commit_args(layers: int) -> tuple:
    pools = bare(layers, SLOTS, HEADS, HEAD, HEAD, dtype=FP32), bare(layers, SLOTS, 3, CHANNELS)
    columns = (bare(REQUESTS, dtype=LONG) for _ in range(3))
    return *pools, *kda_records(layers), bare(layers, SLOTS, 8, CHANNELS), *columns


def kda_ops() -> list[Cell]:
    """KDA. Of a step the state in and out is nearly all; of a prompt the rows, and the products of chunks."""
    state, row = HEADS * HEAD * HEAD, (7 * CHANNELS + 3 * HEADS * HEAD) * 2
    inner, layers = HEADS * HEAD, 69
    step = REQUESTS * (2 * 4 * state + row) + CHANNELS * 16
    cells = [Cell("kda_decode", "decode", kda_decode_args, step, 7 * state * REQUESTS)]
    for case, tokens in (("decode", REQUESTS), ("prefill", ROWS)):
        f = lambda t=tokens: part_of(t, inner, 4 * inner).view(t, HEADS, HEAD)  # noqa: E731
        args = lambda f=f: (f(), *(bare(n, dtype=FP32) for n in (HEADS, inner)), -5.0)  # noqa: E731
        cells.append(Cell("kda_decay", case, args, 6 * tokens * inner, 8 * tokens * inner))
    columns = lambda: tuple(bare(64, dtype=torch.int32) for _ in range(2))  # noqa: E731
    into = lambda t: (bare(2 * t, HEADS, HEAD), t)  # noqa: E731
    rows, states = ROWS * inner * 12, 2 * 4 * REQUESTS * state
    chunks = 2 * ROWS * HEADS * HEAD * (3 * HEAD + 4 * 64)
    products = (("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("sm_103", "tcgen05"))
    for op, more in (
        ("kda_prefill", lambda: ()),
        ("kda_prefill_into", lambda: into(ROWS)),
        ("kda_prefill_export", columns),
        ("kda_prefill_export_into", lambda: (*columns(), *into(ROWS))),
    ):
        args = lambda more=more: kda_args(ROWS, *more())  # noqa: E731
        cells.append(Cell(op, "prefill", args, rows + states, chunks, needs=products))
    pool = lambda: (bare(64, dtype=torch.int32), bare(2, 64, HEADS, HEAD, HEAD, dtype=FP32), 1)  # noqa: E731
    for op, more in (("kda_scan", lambda: ()), ("kda_scan_export", pool)):
        args = lambda more=more: scan_args(*more())  # noqa: E731
        cells.append(Cell(op, "prefill", args, rows + states, chunks, needs=products))
    drafts = 8 * REQUESTS
    moved, flops = drafts * inner * 22 + states // 2, 7 * drafts * state
    records, slots = drafts * inner * 10, lambda: bare(REQUESTS, 8, dtype=LONG)
    for op, more in (("kda_verify_states", lambda: ()), ("kda_verify_states_into", lambda: into(drafts))):
        args = lambda more=more: kda_args(drafts, slots(), *more())  # noqa: E731
        written = 4 * drafts * state - records
        cells.append(Cell(op, "verify", args, moved + written, flops))
    return [
        *cells,
        Cell("kda_verify", "verify", lambda: kda_args(drafts, *kda_records()), moved, flops),
        Cell(
            "kda_verify_into", "verify", lambda: kda_args(drafts, *kda_records(), *into(drafts)), moved, flops
        ),
        Cell(
            "kda_commit", "verify", lambda: kda_commit_args(layers),
            layers * (states + records + 12 * REQUESTS * CHANNELS), 4 * layers * drafts * state,
        ),
    ]  # fmt: skip


def moe_ops() -> list[Cell]:
    """Choosing experts, and what follows them."""
    matrix = (("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("sm_103", "tcgen05"), ("gfx950", "mfma"))
    cells = []
    for case, tokens in (("decode", REQUESTS), ("prefill", ROWS)):
        routed = lambda t=tokens: (  # noqa: E731
            bare(t, WIDTH), bare(EXPERTS, WIDTH), bare(EXPERTS, dtype=FP32), TOP_K, 1.0, True,
        )  # fmt: skip
        rows = lambda t=tokens: (  # noqa: E731
            bare(t * TOP_K, LATENT), bare(t, TOP_K, dtype=FP32), bare(t, TOP_K, dtype=torch.int32),
        )  # fmt: skip
        tail = lambda t=tokens, rows=rows: (  # noqa: E731
            *rows(), *gains(LATENT), bare(WIDTH, LATENT), bare(t, WIDTH), 1e-5, "",
        )  # fmt: skip
        chosen = tokens * TOP_K * (LATENT * 2 + 8)
        read = (tokens + EXPERTS) * WIDTH * 2 + tokens * TOP_K * 12
        up = (WIDTH * LATENT + 2 * tokens * WIDTH) * 2
        sums = 2 * tokens * TOP_K * LATENT
        cells += [
            Cell("route", case, routed, read, 2 * tokens * EXPERTS * WIDTH, needs=matrix),
            Cell("finalize", case, rows, chosen + tokens * LATENT * 2, sums),
            Cell("latent_tail", case, tail, chosen + up, sums + 2 * tokens * WIDTH * LATENT),
        ]
    return cells


def expert_args(tokens: int) -> tuple:
    """Rows and the packed weights of an eighth of every expert's inner columns."""
    packed = lambda rows, columns: (  # noqa: E731
        bare(EXPERTS, rows, columns // 2, dtype=torch.uint8),
        bare(EXPERTS, rows, columns // 32, dtype=torch.uint8),
    )
    gate, up, down = packed(EXPERT_INNER, LATENT), packed(EXPERT_INNER, LATENT), packed(LATENT, EXPERT_INNER)
    return bare(tokens, LATENT), bare(tokens, TOP_K, dtype=LONG), *gate, *up, *down, 4.0, 25.0


def expert_ops() -> list[Cell]:
    """The experts. Rows that choose alike read as many of them as are expected to be chosen at all."""
    matrix = (("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("sm_103", "tcgen05"), ("gfx950", "mfma"))
    scaled = (("sm_100", "tcgen05_block_scale"), ("sm_103", "tcgen05_block_scale"), ("gfx950", "mfma_scale"))
    cells = []
    for case, tokens in (("decode", REQUESTS), ("chunk", CHUNK), ("prefill", ROWS)):
        args, choices = partial(expert_args, tokens), tokens * TOP_K
        read = round(EXPERTS * (1 - (1 - 1 / EXPERTS) ** choices))
        weights = read * 3 * EXPERT_INNER * LATENT * 17 // 32
        rows, flops = 2 * (tokens + choices) * LATENT, 6 * choices * LATENT * EXPERT_INNER
        moved = weights + rows + 12 * choices
        cells += [
            Cell("experts_unfinalized", case, args, moved, flops, needs=matrix),
            Cell(
                "experts_unfinalized", case, args, moved, flops, "fp8", scaled, "triton_mxfp8",
                tuple(target for target, _ in scaled),
            ),
        ]  # fmt: skip
    return cells


def mla_ops() -> list[Cell]:
    """Attention over contexts of 8192 tokens in pages of 64; the latents of each are read once."""
    context, page, width, kept, value = 8192, 64, HEAD + 64, 512, HEAD
    matrix = tuple((t, "mfma" if t == "gfx950" else "mma_sync") for t in PARTS)
    wide = (("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("sm_103", "tcgen05"), ("gfx950", "mfma"))
    cells = []
    for case, tokens in (("decode", REQUESTS), ("verify", 8 * REQUESTS), ("prefill", ROWS)):
        args = lambda t=tokens: (  # noqa: E731
            bare(t, HEADS, width), bare(HEADS * (HEAD + value), kept), bare(4000, page, kept + 64),
            bare(REQUESTS, context // page + 1, dtype=LONG), bare(REQUESTS, dtype=LONG),
            bare(REQUESTS + 1, dtype=LONG), width**-0.5,
        )  # fmt: skip
        latents, kv_b = REQUESTS * context * (kept + 64) * 2, HEADS * (HEAD + value) * kept
        rows = tokens * HEADS * (width + value) * 2
        flops = 2 * tokens * HEADS * (context * (2 * kept + 64) + (HEAD + value) * kept)
        if case == "prefill":  # keys and values made once; a token sees half of its request's own, on average
            seen = context - tokens // REQUESTS // 2
            flops = 2 * HEADS * (tokens * seen * (width + value) + REQUESTS * context * (HEAD + value) * kept)
        needs = wide if case == "prefill" else matrix
        cells.append(Cell("mla_attend", case, args, latents + 2 * kv_b + rows, flops, needs=needs))
    for case, tokens in (("decode", REQUESTS), ("prefill", ROWS)):
        args = lambda t=tokens: (  # noqa: E731
            part_of(t, kept + 64, 4096), bare(4000, page, kept + 64), bare(REQUESTS, 130, dtype=LONG),
            bare(REQUESTS, dtype=LONG), bare(REQUESTS + 1, dtype=LONG),
        )  # fmt: skip
        cells.append(Cell("mla_write", case, args, 4 * tokens * (kept + 64), 0))
    return cells


def every_cell() -> list[Cell]:
    """All of them, in a fixed order."""
    return [
        *row_ops("decode", REQUESTS),
        *row_ops("prefill", ROWS),
        *conv_ops(),
        *kda_ops(),
        *moe_ops(),
        *expert_ops(),
        *mla_ops(),
    ]

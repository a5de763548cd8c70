"""Ops that have more than one implementation here: the meaning beside each, and beside the machine's limits.

    bandwidth    a sweep over more memory than the last cache holds four times: GB/s of what must be read
    read+write   the same where what is read is written too: GB/s of both
    compute      many rows on the same weights: GFLOP/s
    replayed     the calls in C alone, as a step of few rows repeats them; else ops go through the dispatcher

A cell counts what the op itself must move and compute, whatever an implementation does. Opaque ops
are one call to Inductor, so there is no column for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table
from torch.nn import functional as F

from .. import kernels  # noqa: F401  (declares the ops)
from ..kernels.op import OPS, Op
from ..program import Call, run, shortened
from ..recording import Recording
from .attention_cells import ATTENTIONS
from .limits import MachineLimits, SameMemory, Sample, interleaved, measure

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
ASSUMED_CACHE = 32 << 20  # bytes, where the system does not tell
LIMIT_OF = {  # kind of a cell -> which of the machine's limits bounds it
    "bandwidth": "bytes_per_second",
    "read+write": "copy_bytes_per_second",
    "compute": "flops_per_second",
}
READ = "a read alone"  # of the same memory in the same rounds
NEARLY = 0.05  # of the bytes that a sweep must read, by which all its memory may differ from them
BUSY = 0.5  # load average a thread from which on a run is said to be disturbed


@dataclass(frozen=True)
class Cell:
    """One op on one shape. calls: argument tuples of one sweep, each used in turn."""

    op: str
    case: str
    kind: str  # one of LIMIT_OF
    calls: Sequence[tuple]
    bytes: int  # that a sweep must read and write
    flops: int  # of a sweep, a multiply-add counting two
    rivals: Mapping[str, Callable] = field(default_factory=dict)  # other calls, same arguments


@dataclass(frozen=True)
class Timing:
    """One implementation on one cell; a sample is the seconds of a sweep."""

    op: str
    case: str
    kind: str
    by: str  # meaning, or an implementation's name
    sample: Sample
    bytes_per_second: float
    flops_per_second: float
    share: float  # of the machine's limit that the cell's kind names
    against_meaning: float  # how many times as fast


@dataclass(frozen=True)
class Result:
    """All timings of one run, with the limits measured in it and how busy the machine was."""

    limits: MachineLimits
    load: float  # processes that wanted to run, average of the minute before
    timings: list[Timing] = field(default_factory=list)

    @property
    def disturbed(self) -> bool:
        """Whether others were running: then shares are a lower bound, and ratios are noisy."""
        return self.load > BUSY * self.limits.threads

    def to_json(self) -> dict:
        return asdict(self) | {"disturbed": self.disturbed}


def bench(rounds: int = 5, scale: float = 1.0, ops: Sequence[str] = ()) -> Result:
    """Time every cell of ``ops`` (default all). scale: of the working sets; below 1 they may fit a cache.

    Raises ValueError for a count or scale that is not positive, and for an op without a cell.
    """
    if rounds < 1 or scale <= 0:
        raise ValueError(f"rounds and scale must be positive, got {rounds} and {scale}")
    if unknown := sorted(set(ops) - set(CELLS)):
        raise ValueError(f"no cell for {', '.join(unknown)}; there are cells for {', '.join(CELLS)}")
    load, side = os.getloadavg()[0], max(256, int(8192 * min(scale, 1.0) ** 0.5))
    limits, found = measure(side), []
    for name in ops or CELLS:
        for cell in CELLS[name](int(4 * last_cache() * scale)):
            found.append((of_cell(cell), samples_of(cell, rounds)))
    limits = limits.or_better(measure(side))
    return Result(limits, load, [t for cell, samples in found for t in timings(cell, samples, limits)])


def last_cache() -> int:
    """Bytes of the largest cache of the first CPU."""
    sizes = [f.read_text().strip() for f in CACHE.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max([int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units], default=ASSUMED_CACHE)


def implementations_here(op: Op, args: tuple) -> list[str]:
    """Those that take these arguments on this machine."""
    return [name for name, i in op.implementations.items() if i.objection(*args) is None]


def of_cell(cell: Cell) -> Cell:
    """The cell without its arguments, which may be large."""
    return replace(cell, calls=())


def samples_of(cell: Cell, rounds: int) -> dict[str, Sample]:
    """Times of the meaning, of all that fit and of the cell's rivals, in turns."""
    packet = getattr(torch.ops.k3, cell.op)
    named = {"meaning": packet.default}
    named |= {name: getattr(packet, name) for name in implementations_here(OPS[cell.op], cell.calls[0])}
    named |= cell.rivals

    def sweep(call: Callable) -> Callable[[], None]:
        def all_calls() -> None:
            for args in cell.calls:
                call(*args)

        return all_calls

    sweeps = {name: sweep(call) for name, call in named.items()}
    if cell.kind != "compute":
        again = {f"{name}, replayed": replayed(cell, name) for name in named if by_address(cell.op, name)}
        sweeps |= {name: run for name, run in again.items() if run is not None}
    memory = SameMemory(a for args in cell.calls for a in args if isinstance(a, torch.Tensor))
    if cell.kind == "bandwidth" and abs(memory.bytes / cell.bytes - 1) < NEARLY:
        sweeps[READ] = memory
    return interleaved(sweeps, rounds)


def by_address(op: str, name: str) -> bool:
    """Whether steps of few rows repeat the C calls of this implementation in place of the op."""
    implementation = OPS[op].implementations.get(name)
    return implementation is not None and implementation.by_address


def replayed(cell: Cell, name: str) -> Callable[[], None] | None:
    """A sweep as a replayed step makes it; None where an op has to be called after all."""
    overload, recordings = getattr(getattr(torch.ops.k3, cell.op), name), []
    for args in cell.calls:
        recordings.append(
            Recording([a for a in args if isinstance(a, torch.Tensor) and not a.is_floating_point()])
        )
        with recordings[-1].ops():
            overload(*args)
    if any(r.refused for r in recordings):
        return None
    return Again(recordings, shortened([call for r in recordings for call in r.calls]))


@dataclass(frozen=True)
class Again:
    """Recorded calls, to be made again."""

    recordings: list[Recording]  # what they keep is what the calls point to
    calls: list[Call]

    def __call__(self) -> None:
        run(self.calls)


def timings(cell: Cell, samples: Mapping[str, Sample], limits: MachineLimits) -> list[Timing]:
    """The samples of a cell beside the limit of its kind."""
    found, limit = [], getattr(limits, LIMIT_OF[cell.kind])
    for name, sample in samples.items():
        moved, computed = cell.bytes / sample.median, cell.flops / sample.median
        share = (computed if cell.kind == "compute" else moved) / limit
        ratio = samples["meaning"].median / sample.median
        computed = 0.0 if name == READ else computed
        found.append(Timing(cell.op, cell.case, cell.kind, name, sample, moved, computed, share, ratio))
    return found


def experts_cells(least: int) -> Iterator[Cell]:
    """One token over experts that no cache holds, then many tokens on a few; the widths of ``small``."""
    latent = inner = 512
    one = 3 * latent * inner * 17 // 32  # bytes of an expert: half a byte a weight, and a scale for 32
    count = -(-least // (4 * one)) * 4
    weights = random_experts(count, latent, inner)
    z = torch.randn(1, latent)
    calls = [
        (z, torch.arange(first, first + 4).view(1, 4), *weights, 4.0, 25.0) for first in range(0, count, 4)
    ]
    yield Cell(
        "experts_unfinalized",
        "1 token, 4 experts",
        "bandwidth",
        calls,
        count * one,
        count * 6 * latent * inner,
    )
    for rows in (8, 64):
        few = tuple(w[:4] for w in weights)
        ids = torch.arange(4).repeat(rows).view(-1, 1)
        call = torch.randn(len(ids), latent), ids, *few, 4.0, 25.0
        flops = 6 * latent * inner * len(ids)
        yield Cell("experts_unfinalized", f"{rows} rows an expert", "compute", [call], 4 * one, flops)


def random_experts(count: int, latent: int, inner: int) -> tuple[torch.Tensor, ...]:
    """Packed weights w1, w3, w2 with their scales: any bytes are codes; the scales are near 1/64."""
    parts = []
    for outputs, inputs in ((inner, latent), (inner, latent), (latent, inner)):
        parts.append(torch.randint(256, (count, outputs, inputs // 2), dtype=torch.uint8))
        parts.append(torch.randint(119, 123, (count, outputs, inputs // 32), dtype=torch.uint8))
    return tuple(parts)


def kda_cells(least: int) -> Iterator[Cell]:
    """One request, then eight, on states that no cache holds; then a prompt. The widths of ``small``."""
    heads, width = 8, 128
    one = heads * width * width * 4
    slots = max(16, -(-least // one)) // 8 * 8
    state = torch.randn(slots + 1, heads, width, width)
    for rows in (1, 8):
        given, cu = (*random_tokens(rows, heads, width), state), torch.arange(rows + 1)
        calls = [(*given, torch.arange(s, s + rows), cu) for s in range(1, slots + 1, rows)]
        case = f"{rows} row{'s' * (rows > 1)} of one token"
        flops = slots * heads * width * width * 7
        yield Cell("kda_prefill", case, "read+write", calls, 2 * slots * one, flops)
    for tokens in (64, 1024):
        given = random_tokens(tokens, heads, width)
        call = *given, state, torch.tensor([1]), torch.tensor([0, tokens])
        moved = 4 * (2 * given[2].numel() + sum(x.numel() for x in given[:2] + given[3:]))
        flops = tokens * heads * width * width * 7
        yield Cell("kda_prefill", f"a row of {tokens}", "compute", [call], moved + 2 * one, flops)


def verify_cells(name: str) -> Iterator[Cell]:
    """Eight requests of nine drafted rows, or what is kept of them; the widths of ``small``."""
    heads, width, rows, drafted = 8, 128, 8, 9
    slots = torch.arange(1, rows + 1)
    into = torch.arange(rows + 1, rows * (drafted + 1) + 1).view(rows, drafted)
    state = torch.randn(rows * (drafted + 1) + 1, heads, width, width)
    given = *random_tokens(rows * drafted, heads, width), state, slots, torch.arange(rows + 1) * drafted
    records = tuple(-torch.rand(rows + 1, drafted, heads, width) for _ in range(3))
    calls = {
        "kda_verify": (*given, *records),
        "kda_verify_states": (*given, into),
        "kda_commit": (
            *(state, torch.randn(len(state), 3, 3 * heads * width), *records),
            *(torch.randn(rows + 1, drafted, 3 * heads * width), slots, torch.full((rows,), drafted), slots),
        ),
    }
    products = {"kda_verify": 4, "kda_verify_states": 7, "kda_commit": 3}[name]
    flops, moved = rows * drafted * heads * width * width * products, rows * state[0].numel() * 4
    yield Cell(name, f"{rows} rows of {drafted} drafted", "compute", [calls[name]], moved, flops)


def random_tokens(tokens: int, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g and beta of KDA."""
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, width), dim=-1) for _ in range(2))
    return (
        q,
        k,
        torch.randn(tokens, heads, width),
        -torch.rand(tokens, heads, width),
        torch.rand(tokens, heads),
    )


def conv_cells(name: str) -> Iterator[Cell]:
    """Eight requests, of one token or nine, then a prompt; widths of ``small``, which a cache may hold."""
    channels, drafted = 3072, 9
    lengths = ([1] * 8, [1024]) if name == "short_conv" else ([drafted] * 8,)
    for rows in lengths:
        x, count = torch.randn(sum(rows), channels), len(rows)
        given = x, torch.randn(channels, 4), torch.randn(count * (drafted + 1) + 1, 3, channels)
        cu = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])
        more = {
            "short_conv": (),
            "short_conv_verify": (torch.zeros(count + 1, drafted, channels),),
            "short_conv_verify_states": (
                torch.arange(count + 1, count * (drafted + 1) + 1).view(count, drafted),
            ),
        }[name]
        call = *given, torch.arange(1, count + 1), cu, *more
        case = f"{count} row{'s' * (count > 1)} of {rows[0]}"
        yield Cell(name, case, "compute", [call], 8 * x.numel(), 12 * x.numel())


def tail_cells(least: int) -> Iterator[Cell]:
    """One token with the up-projections of many layers, then 128 tokens; the widths of ``small``."""
    hidden, latent, top_k = 1024, 512, 4
    layers = max(1, -(-least // (hidden * latent * 4)))
    ups = torch.randn(layers, hidden, latent)
    for tokens, some, kind in ((1, ups, "bandwidth"), (128, ups[:1], "compute")):
        idx = torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
        first = torch.randn(tokens * top_k, latent), torch.rand(tokens, top_k), idx, torch.ones(latent)
        rest = torch.randn(tokens, hidden), 1e-5, ""
        calls = [(*first, up, *rest) for up in some]
        flops = len(some) * 2 * tokens * hidden * latent
        case = f"{tokens} token{'s' * (tokens > 1)}"
        yield Cell("latent_tail", case, kind, calls, some.numel() * 4, flops)


def linear_cells(least: int) -> Iterator[Cell]:
    """One token and four with matrices that no cache holds, then many with one; q, k and v of ``small``."""
    outputs, inputs = 3072, 1024
    layers = max(2, -(-least // (outputs * inputs * 2)))
    weights = (torch.randn(layers, outputs, inputs) * inputs**-0.5).bfloat16()
    for tokens in (1, 4):
        x = torch.randn(tokens, inputs)
        rivals = {"bfloat16 linear": lambda x, w: F.linear(x.bfloat16(), w)}
        if tokens == 1:
            rivals["bfloat16 mv"] = lambda x, w: torch.mv(w, x[0].bfloat16())
        flops, case = 2 * tokens * weights.numel(), f"{tokens} token{'s' * (tokens > 1)}"
        calls = [(x, w) for w in weights]
        yield Cell("linear_bf16", case, "bandwidth", calls, weights.numel() * 2, flops, rivals)
    wide = weights[0].float()
    for tokens in (16, 64, 2048):
        x, rivals = torch.randn(tokens, inputs), {"float32 linear": lambda x, w: F.linear(x, wide)}
        moved, flops = 2 * wide.numel(), 2 * tokens * wide.numel()
        yield Cell("linear_bf16", f"{tokens} tokens", "compute", [(x, weights[0])], moved, flops, rivals)


def route_cells(least: int) -> Iterator[Cell]:
    """One token and many; the widths of ``small``."""
    width, experts = 1024, 32
    gate, bias = torch.randn(experts, width), torch.zeros(experts)
    for tokens in (1, 512):
        call = torch.randn(tokens, width), gate, bias, 4, 1.0, True
        moved, flops = gate.numel() * 4 + tokens * width * 4, 2 * tokens * experts * width
        yield Cell("route", f"{tokens} token{'s' * (tokens > 1)}", "compute", [call], moved, flops)


CELLS: dict[str, Callable[[int], Iterator[Cell]]] = {
    "experts_unfinalized": experts_cells,
    "kda_prefill": kda_cells,
    **{
        name: lambda least, name=name: verify_cells(name)
        for name in ("kda_verify", "kda_verify_states", "kda_commit")
    },
    **{
        name: lambda least, name=name: conv_cells(name)
        for name in ("short_conv", "short_conv_verify", "short_conv_verify_states")
    },
    "latent_tail": tail_cells,
    **{
        name: lambda least, name=name, parts=parts: (Cell(name, *part) for part in parts(least))
        for name, parts in ATTENTIONS.items()
    },
    "linear_bf16": linear_cells,
    "route": route_cells,
}


def table(result: Result) -> Table:
    """A row a timing, grouped by cell."""
    limits = result.limits
    busy = f", load {result.load:.1f}: others were running" if result.disturbed else ""
    title = (
        f"{limits.threads} threads; reads {limits.bytes_per_second / 1e9:.1f} GB/s, reads and writes "
        f"{limits.copy_bytes_per_second / 1e9:.1f} GB/s, float32 matmul "
        f"{limits.flops_per_second / 1e9:.0f} GFLOP/s{busy}"
    )
    made = Table(title=title)
    for column in ("op", "case", "by", "ms", "GB/s", "GFLOP/s", "of the limit", "x meaning"):
        made.add_column(column, justify="left" if column in ("op", "case", "by") else "right")
    for t in result.timings:
        numbers = f"{t.sample.median * 1e3:.2f}", f"{t.bytes_per_second / 1e9:.1f}"
        rate = f"{t.flops_per_second / 1e9:.1f}"
        share = f"{t.share:.0%} {t.kind}"
        made.add_row(t.op, t.case, t.by, *numbers, rate, share, f"{t.against_meaning:.1f}")
    return made

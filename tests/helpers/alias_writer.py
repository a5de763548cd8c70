"""Random programs for the alias fuzzer: those of alias_programs, and more that our passes look at.

    v0 = a.index_select(0, torch.arange(n0, n1))        a gather of an input that nobody wrote yet
    a.mul_(0.5)                                         most writes go where something was gathered from
    torch.ops.k3test.rev_into(v0, a)                    or give an op what was gathered beside what it writes
    return v0 + 1,

Strided views at data-dependent offsets, gather and scatter, several spellings of one write, test ops and k3
ops that write their arguments. Drawn evenly, a program nearly never reads an old content late, so most
writes are drawn towards what was gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from alias_programs import RANGES, ROWS, WIDTH, Writer

HEADER = """def program(a, b, pools, spans, pick, cu):
    n0, n1, k = spans[0].item(), spans[1].item(), spans[2].item()
    torch._check(n0 >= 0)
    torch._check(n0 <= n1)
    torch._check(n1 <= 8)
    torch._check(k >= 0)
    torch._check(k <= 5)
"""
CALLS = [(2, 5, 1), (0, 0, 0), (8, 8, 5), (3, 3, 3), (0, 8, 2), (1, 6, 4)]  # n0, n1, k


KINDS = {  # statement: how often, beside the others
    "gather": 4,
    "scatter": 3,
    "custom": 3,
    "scale": 2,
    "beside": 2,
    "assign": 2,
    "strided": 2,
    **dict.fromkeys(["put", "view", "pure", "clone", "strided_custom", "convolve", "gather2"], 1),
    **dict.fromkeys(["scatter2", "slice_scatter", "add_at", "column", "pool_row"], 1),
}
LEANING = 0.6  # of the writes go to what was gathered from, while it is still read


class FuzzWriter(Writer):
    """Programs over everything our passes look at. ``pools`` is [2, 3, WIDTH], the windows of short_conv."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.gathered: dict[str, str] = {}  # variable: what it was gathered from

    def write(self, steps: int) -> None:
        """Draw that many statements."""
        for step in range(steps):
            (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
            getattr(self, kind)(f"v{step}")

    def leans(self) -> bool:
        return bool(self.gathered) and self.rng.random() < LEANING

    def read(self) -> str:
        """Something of 8 rows to gather from: often an argument, of which a view could be given."""
        return self.rng.choice(["a", "b"]) if self.rng.random() < 0.5 else self.any("8")

    def written(self) -> str:
        """Something of 8 rows to write: often what a variable was gathered from."""
        return self.rng.choice(sorted(self.gathered.values())) if self.leans() else self.any("8")

    def gather(self, new: str) -> None:
        start, end, length = self.range(used=False)
        base = self.read()
        self.line(f"{base}.index_select(0, {self.index(start, end)})", new, length)
        self.gathered[new] = base

    def scatter(self, new: str) -> None:
        start, end, length = self.range(used=True)
        base, rows, index = self.written(), self.any(length), self.index(start, end)
        if self.rng.random() < 0.5:
            self.line(f"{base}.index_copy_(0, {index}, {rows} * 1)")
        else:
            self.line(f"torch.index_copy({base}, 0, {index}, {rows})", new, "8")

    def assign(self, new: str) -> None:
        start, end, length = self.range(used=True)
        self.line(f"{self.written()}[{start}:{end}] = {self.any(length)} * 1")

    def scale(self, new: str) -> None:
        target = self.written() if self.rng.random() < 0.7 else self.any()
        self.line(f"{target}.mul_(0.5)")

    def custom(self, new: str) -> None:
        """An op that writes; often given, or a view of, what was gathered from what it writes."""
        rows, target = self.any(), self.any("8")
        if self.leans():
            rows, target = self.rng.choice(sorted(self.gathered.items()))
            rows += self.rng.choice(["", "", ".view(-1, 3)", ".detach()"])
        if self.owner.get(rows.split(".")[0]) != self.owner[target]:  # no op may be given one tensor twice
            self.line(f"torch.ops.k3test.rev_into({rows}, {target})")

    def beside(self, new: str) -> None:
        """Rows of an argument, given to an op that writes that argument: it may read its own writes."""
        start, end, length = self.range(used=False)
        base = self.rng.choice(["a", "b"])
        self.line(f"{base}.index_select(0, {self.index(start, end)})", new, length)
        self.line(f"torch.ops.k3test.rev_into({new}, {base})")

    def put(self, new: str) -> None:
        start, end, length = self.range(used=True)
        base, rows, index = self.written(), self.any(length), self.index(start, end)
        how = self.rng.choice(
            ["{b}[{i}] = {r} * 1", "{b}.index_put_(({i},), {r} + 0)", "torch.index_put({b}, ({i},), {r})"]
        ).format(b=base, i=index, r=rows)
        if how.startswith("torch"):
            self.line(how, new, "8")
        else:
            self.line(how)

    def strided(self, new: str) -> None:
        base = self.any("8")
        how = self.rng.choice(["narrow(0, k, 3)", "t().narrow(1, k, 3).t()", "narrow(0, k, 3).flip(0)"])
        self.line(f"{base}.{how}", new, "3", None if "flip" in how else self.owner[base])

    def strided_custom(self, new: str) -> None:
        rows, target = self.any("3"), self.any("8")
        if rows in self.length and self.owner[rows] != self.owner[target]:
            view = self.rng.choice(["narrow(0, k, 3)", "t().narrow(1, k, 3).t()", "narrow(0, 2, 3)"])
            self.line(f"torch.ops.k3test.rev_into({rows}, {target}.{view})")

    def convolve(self, new: str) -> None:
        length = self.rng.choice(["8", "3"])
        rows, slot = self.any(length), self.rng.choice([0, 1])
        cu = "cu[0]" if length == "8" else "cu[1]"
        slots = f"pick[{slot}:{slot + 1}] % 2"
        self.line(
            f"torch.ops.k3.short_conv({rows}, a.new_ones({WIDTH}, 4), pools, {slots}, {cu})", new, length
        )

    def pool_row(self, new: str) -> None:
        self.line(f"pools[{self.rng.choice([0, 1])}]", new, "3", "pools")

    def gather2(self, new: str) -> None:
        start, end, length = self.range(used=False)
        index = f"({self.index(start, end)}).unsqueeze(1).expand(-1, {WIDTH})"
        base = self.read()
        self.line(f"{base}.gather(0, {index})", new, length)
        self.gathered[new] = base

    def scatter2(self, new: str) -> None:
        start, end, length = self.range(used=True)
        index = f"({self.index(start, end)}).unsqueeze(1).expand(-1, {WIDTH})"
        self.line(f"{self.written()}.scatter_(0, {index}, {self.any(length)} * 1)")

    def slice_scatter(self, new: str) -> None:
        start, end, length = self.range(used=True)
        self.line(f"torch.slice_scatter({self.any('8')}, {self.any(length)}, 0, {start}, {end})", new, "8")

    def add_at(self, new: str) -> None:
        start, end, length = self.range(used=True)
        index = self.index(start, end)
        self.line(f"{self.written()}.index_add_(0, {index}, {self.any(length)} + 0)")

    def column(self, new: str) -> None:
        how = self.rng.choice(["flip(0)", "index_select(1, torch.arange(0, 3))", "cumsum(0)"])
        base = self.any()
        self.line(f"{base}.{how}", new, self.length[base])

    def any(self, length: str | None = None) -> str:
        fitting = [v for v, rows in sorted(self.length.items()) if length in (None, rows)]
        if not fitting:  # every length can be cut from the first input
            start, end, _ = next(r for r in RANGES.values() if r[2] == length)
            return f"a[{start}:{end}].clone()"
        return self.rng.choice(fitting)


@dataclass(frozen=True)
class Program:
    """Lines of a body, and what it returns: expressions over its variables."""

    lines: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"{HEADER}{body}    return {', '.join(self.results)},\n"


def written(seed: int) -> tuple[Program, list[str]]:
    """Program ``seed``, four to eight statements, and every variable it could have returned."""
    writer = FuzzWriter(seed)
    writer.write(4 + seed % 5)
    return Program(tuple(writer.lines), tuple(chosen(writer))), sorted(writer.length)


def chosen(writer: Writer) -> list[str]:
    """Some of the variables, as they are or as values of their own."""
    return writer.results().split(", ")


def arguments(n0: int, n1: int, k: int, seed: int = 0) -> list[torch.Tensor]:
    """Arguments of any program; whole numbers, so that no order of adding them rounds."""
    made = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (ROWS, WIDTH), generator=made).float() for _ in range(2))
    pools = torch.randint(-2, 3, (2, 3, WIDTH), generator=made).float()
    pick = torch.randperm(ROWS, generator=made)
    return [a, b, pools, torch.tensor([n0, n1, k]), pick, torch.tensor([[0, 8], [0, 3]])]

"""Random straight-line programs about who shares memory with whom, as Python source to be read and rerun.

    def program(a, b, spans, pick):         a, b: [8, 3]; spans: CPU int64 [2], 0 <= n0 <= n1 <= 8; pick: rows
        n0, n1 = ...                        every range below is one of RANGES
        v1 = a.index_select(0, torch.arange(n0, n1))
        rev_into(v1, b)
        b.index_copy_(0, torch.arange(3, 6), v2)
        return ...

A variable is whole (8 rows) or as long as one of the ranges, so that every program has valid shapes.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from itertools import count

import torch

ROWS, WIDTH = 8, 3
RANGES = {  # name: start, end, length class
    "low": ("0", "n0", "n0"),
    "middle": ("n0", "n1", "n1-n0"),
    "high": ("n1", "8", "8-n1"),
    "two": ("2", "5", "3"),
    "three": ("3", "6", "3"),
    "all": ("0", "8", "8"),
}
INDEXES = [
    "torch.arange({s}, {e})",
    "torch.arange({s}, {e})",
    "torch.arange({e})[{s}:]",
    "torch.arange({e} - {s}) + {s}",
    "torch.arange({s}, {e}).flip(0)",
    "pick[{s}:{e}]",
]
HEADER = """def program(a, b, spans, pick):
    n0, n1 = spans[0].item(), spans[1].item()
    torch._check(n0 >= 0)
    torch._check(n0 <= n1)
    torch._check(n1 <= 8)
"""
_number = count()


class Writer:
    """Writes one program; knows each variable's length, and which variables are one tensor's memory."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.length = {"a": "8", "b": "8"}
        self.owner = {"a": "a", "b": "b"}
        self.lines: list[str] = []

    def line(self, text: str, new: str | None = None, length: str = "", owner: str | None = None) -> None:
        self.lines.append(f"{new} = {text}" if new else text)
        if new:
            self.length[new], self.owner[new] = length, owner or new

    def any(self, length: str | None = None) -> str:
        return self.rng.choice([v for v, rows in sorted(self.length.items()) if length in (None, rows)])

    def range(self, used: bool) -> tuple[str, str, str]:
        """A range; with ``used``, one of which some variable has the length."""
        lengths = set(self.length.values())
        return self.rng.choice([r for r in RANGES.values() if not used or r[2] in lengths])

    def index(self, start: str, end: str) -> str:
        return self.rng.choice(INDEXES).format(s=start, e=end)

    def gather(self, new: str) -> None:
        start, end, length = self.range(used=False)
        self.line(f"{self.any('8')}.index_select(0, {self.index(start, end)})", new, length)

    def scatter(self, new: str) -> None:
        start, end, length = self.range(used=True)
        base, rows, index = self.any("8"), self.any(length), self.index(start, end)
        if self.rng.random() < 0.5:
            self.line(f"{base}.index_copy_(0, {index}, {rows} * 1)")
        else:
            self.line(f"torch.index_copy({base}, 0, {index}, {rows})", new, "8")

    def assign(self, new: str) -> None:
        start, end, length = self.range(used=True)
        self.line(f"{self.any('8')}[{start}:{end}] = {self.any(length)} * 1")

    def scale(self, new: str) -> None:
        self.line(f"{self.any()}.mul_(0.5)")

    def custom(self, new: str) -> None:
        rows, target = self.any(), self.any("8")
        if self.owner[rows] != self.owner[target]:  # a custom op may not be given one tensor twice
            self.line(f"torch.ops.k3test.rev_into({rows}, {target})")

    def view(self, new: str) -> None:
        base = self.any()
        how = self.rng.choice(["view(-1, 3)", "t().t()", "unsqueeze(0).squeeze(0)", "detach()"])
        self.line(f"{base}.{how}", new, self.length[base], self.owner[base])

    def pure(self, new: str) -> None:
        base = self.any()
        self.line(f"{base} * 2 + {self.any(self.length[base])}", new, self.length[base])

    def clone(self, new: str) -> None:
        base = self.any()
        self.line(f"{base}.clone()", new, self.length[base])

    def results(self) -> str:
        chosen = self.rng.sample(sorted(self.length), k=min(len(self.length), self.rng.randint(1, 4)))
        return ", ".join(f"{v} + 1" if self.rng.random() < 0.7 else v for v in chosen)


def source(seed: int, steps: int = 8) -> str:
    """The text of program ``seed``."""
    writer = Writer(seed)
    kinds = ["gather", "gather", "scatter", "scatter", "assign", "scale", "custom", "view", "pure", "clone"]
    for step in range(steps):
        getattr(writer, writer.rng.choice(kinds))(f"v{step}")
    body = "".join(f"    {line}\n" for line in writer.lines)
    return f"{HEADER}{body}    return {writer.results()},\n"


def program(text: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function ``text`` defines, with source lines that tracebacks and remarks can show."""
    file = f"<alias program {next(_number)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, object] = {"torch": torch}
    exec(compile(text, file, "exec"), names)
    return names["program"]


def arguments(n0: int, n1: int, seed: int = 0) -> list[torch.Tensor]:
    """Arguments of any program."""
    made = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(ROWS, WIDTH, generator=made) for _ in range(2))
    return [a, b, torch.tensor([n0, n1]), torch.randperm(ROWS, generator=made)]

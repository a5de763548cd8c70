"""The batch that a dry run prices: how many requests of which class, and what that makes of every size.

3 verify requests of 8 rows | 8 decodes | 1 prefill of 32 rows        64 rows, 12 requests
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..runtime.engine_config import EngineConfig


class Rows(NamedTuple):
    """Requests of one class, and token rows of each."""

    requests: int
    rows: int

    @property
    def total(self) -> int:
        return self.requests * self.rows

    def __str__(self) -> str:
        return f"{self.requests}x{self.rows}"


VERIFY, PREFILL = Rows(3, 8), Rows(1, 32)


@dataclass(frozen=True)
class Mix:
    """One step. context: tokens that each request has seen before it, which only MLA reads again.

    Raises ValueError for a step that holds nothing, and for rows that would make another class of a request.
    """

    verify: Rows = VERIFY
    decode: int = 8
    prefill: Rows = PREFILL
    context: int = 4096
    page_size: int = EngineConfig.page_size

    def __post_init__(self) -> None:
        plain = {"decode": self.decode, "context": self.context}
        wrong = [f"{name} is {n}: give 0 or more" for name, n in plain.items() if n < 0]
        wrong += [f"page_size is {self.page_size}: give 1 or more"] if self.page_size < 1 else []
        for name, part in (("verify", self.verify), ("prefill", self.prefill)):
            if part.requests < 0 or part.rows < 0:
                wrong.append(f"{name} is {part}: give 0 or more of both")
            elif part.requests and part.rows < 2:
                wrong.append(f"{name} is {part}: a row alone is a decode, give 2 rows or more")
        if not wrong and not self.tokens:
            wrong.append("the step holds no row: give at least one of verify, decode and prefill")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def tokens(self) -> int:
        """Token rows of the step."""
        return self.verify.total + self.decode + self.prefill.total

    @property
    def requests(self) -> int:
        return self.verify.requests + self.decode + self.prefill.requests

    @property
    def lengths(self) -> list[int]:
        """Token rows of each request, in the order of a step."""
        parts = (self.verify, Rows(self.decode, 1), self.prefill)
        return [part.rows for part in parts for _ in range(part.requests)]

    def requests_after(self, row: int) -> int:
        """Requests that start at a token row or later."""
        starts = accumulate(self.lengths[:-1], initial=0)
        return sum(start >= row for start in starts)

    @property
    def drafts(self) -> int:
        """Drafts of a verify request: all its rows but the first."""
        return max(self.verify.rows - 1, 0)

    @property
    def logit_rows(self) -> int:
        """Rows whose logits are needed: all of a verify request, the last of the others."""
        return self.verify.total + self.decode + self.prefill.requests

    @property
    def max_requests(self) -> int:
        """Entries of the export columns: what an engine of this repository has, or as many as are needed."""
        return max(EngineConfig.max_num_seqs, self.requests)

    def sizes(self, snapshots: int) -> dict[str, int]:
        """Every size that a graph of ours can ask for, by name. snapshots: those that a layer looks at."""
        parts = (self.verify, Rows(self.decode, 1), self.prefill)
        longest = max(part.rows for part in parts if part.requests)
        return {
            **dict.fromkeys(("p.0", "blocks.1", "step.tokens.0"), self.tokens),
            **dict.fromkeys(("step.slots.0", "step.seen.0", "step.pages.0"), self.requests),
            "blocks.0": snapshots,
            "step.pages.1": -(-(self.context + longest) // self.page_size),
            "step.cu_verify.0": self.verify.requests + 1,
            "step.cu_other.0": self.requests - self.verify.requests + 1,
            **{f"step.spans[{i}]": part.total for i, part in enumerate(parts)},
            "step.scratch.0": self.verify.requests,
            "step.scratch.1": self.drafts + 1,
            "step.anchor.0": self.verify.requests,
            "hidden.0": self.logit_rows,
        }

    def __str__(self) -> str:
        parts = [
            counted(self.verify.requests, f"verify request of {self.verify.rows}"),
            counted(self.decode, "decode"),
            counted(self.prefill.requests, f"prefill of {self.prefill.rows}"),
        ]
        said = ", ".join(part for part in parts if part)
        return f"{counted(self.tokens, 'row')}: {said}; each request has seen {self.context} tokens"


def counted(number: int, what: str) -> str:
    """``3 decodes``, ``1 prefill of 32``; nothing of nothing."""
    noun, space, rest = what.partition(" of ")
    return f"{number} {noun}{'s' if number > 1 else ''}{space}{rest}" if number else ""


def rows_of(text: str, name: str) -> Rows:
    """``3x8`` as three requests of eight rows; ``32`` as one request, ``0`` as none. Raises ValueError."""
    parts = text.strip().split("x")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{name} is {text!r}; expected REQUESTSxROWS such as 3x8, or the rows of one")
    numbers = [int(part) for part in parts]
    if len(numbers) == 2:
        return Rows(*numbers)
    return Rows(1, numbers[0]) if numbers[0] else Rows(0, 0)

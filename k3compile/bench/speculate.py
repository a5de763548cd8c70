"""What drafting is worth here: one model served with drafts and without, in one run, at several loads.

    accepted length   tokens a verified row yields: 1 and the drafts that were right          4.2
    by position       share of verified rows whose drafts were right up to there         .9 .8 .7 ...
    throughput        seconds a token without drafts over seconds a token with, at c requests    1.9x

Both engines share nothing but the machine; rounds take turns, so a disturbance meets each of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice, zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table

from ..cli.loading import Loaded, check_checkpoint, load
from ..runtime.engine import Engine, Update
from ..runtime.engine_config import EngineConfig
from ..runtime.request import Request
from ..runtime.sampling_params import SamplingParams
from ..runtime.tokenizer import Tokenizer
from ..serving import Serving, plan
from .limits import Sample
from .recall_tasks import TASKS, generate
from .render import spread

LEVELS = (1, 4, 16)
PROBLEMS, SEED = 8, 1  # of each kind, and other ones than tests ask
_names = count()


@dataclass(frozen=True)
class Level:
    """One load. Samples are seconds a token, all requests together."""

    concurrency: int
    plain: Sample
    drafted: Sample

    @property
    def speedup(self) -> float:
        """Above 1, drafts pay."""
        return self.plain.median / self.drafted.median

    @property
    def worst(self) -> float:
        """The slower quartile with drafts against the faster one without."""
        return self.plain.interval[0] / self.drafted.interval[1]


@dataclass(frozen=True)
class SpeculateResult:
    """All loads of one checkpoint.

    verified: rows of drafts that were verified. accepted: of those, how many had at least 1, 2, ... right.
    """

    name: str
    drafts: str  # where they come from, in words
    temperature: float
    verified: int
    accepted: tuple[int, ...]
    levels: tuple[Level, ...]

    @property
    def mean_length(self) -> float:
        """Tokens a verified row yields."""
        return 1 + sum(self.accepted) / max(1, self.verified)

    @property
    def by_position(self) -> list[float]:
        """Share of verified rows whose first i drafts were right."""
        return [n / max(1, self.verified) for n in self.accepted]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "name": self.name,
            "drafts": self.drafts,
            "temperature": self.temperature,
            "mean_accepted_length": self.mean_length,
            "acceptance_by_position": self.by_position,
            "levels": {
                level.concurrency: {
                    "seconds_per_token": spread(level.plain),
                    "seconds_per_token_with_drafts": spread(level.drafted),
                    "speedup": level.speedup,
                    "speedup_lower": level.worst,
                }
                for level in self.levels
            },
        }


def bench(
    checkpoint: Path,
    prompts: Sequence[str] = (),
    *,
    num_drafts: int = 7,
    draft: Path | None = None,
    levels: Sequence[int] = LEVELS,
    tokens: int = 64,
    rounds: int = 5,
    temperature: float = 0.0,
    compiled: bool = True,
    **engine: Any,
) -> SpeculateResult:
    """Measure a checkpoint.

    prompts: texts to go on from, taken in turn (none: problems that the tiny model is trained on). draft: see
    :func:`k3compile.serving.plan`. levels: requests at once. tokens: the most of an answer. engine: further
    fields of EngineConfig. Raises ValueError for a count below 1 and for what cannot be served.
    """
    given = {"num_drafts": num_drafts, "tokens": tokens, "rounds": rounds, "level": min(levels, default=0)}
    if small := [f"{name} must be at least 1, got {n}" for name, n in given.items() if n < 1]:
        raise ValueError("; ".join(small))
    ids = prompt_ids(checkpoint, prompts)
    sizes = {"max_num_seqs": max(levels), "max_model_len": max(map(len, ids)) + tokens + 1}
    config = EngineConfig(**{"num_drafts": num_drafts, **sizes, **engine})
    drafting = plan(config, checkpoint=checkpoint, draft=draft, compiled=compiled)
    plain = plan(replace(config, num_drafts=0, adaptive_verification=False), compiled=compiled)
    sides = [loaded(checkpoint, one, compiled) for one in (plain, drafting)]
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0 if temperature else None)
    for side in sides:
        serve(side.engine, ids[: max(levels)], params)  # nothing happens for the first time from here on
    before = sides[1].engine.stats()
    found = tuple(level(sides, ids, params, concurrency, rounds) for concurrency in levels)
    after = sides[1].engine.stats()
    return SpeculateResult(
        name=checkpoint.name,
        drafts=drafting.drafts(),
        temperature=temperature,
        verified=sum(after.drafts_proposed[:1]) - sum(before.drafts_proposed[:1]),
        accepted=gained(before.drafts_accepted, after.drafts_accepted),
        levels=found,
    )


def prompt_ids(checkpoint: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of the prompts, or of problems of every kind."""
    check_checkpoint(checkpoint)
    tokenizer = Tokenizer(checkpoint)
    if prompts:
        return [tokenizer.encode(prompt) for prompt in prompts]
    each = [generate(task, PROBLEMS, seed=SEED) for task in TASKS]
    return [problem.prompt_ids(tokenizer) for problems in zip(*each) for problem in problems]


def gained(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Entry by entry; ``before`` may be shorter."""
    return tuple(b - a for a, b in zip_longest(before, after, fillvalue=0))


def loaded(checkpoint: Path, serving: Serving, compiled: bool) -> Loaded:
    """A model with its engine, compiled when asked."""
    made = load(checkpoint, serving.engine, draft=serving.draft)
    if compiled:
        made.compile(serving.options)
    return made


def level(
    sides: Sequence[Loaded],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    rounds: int,
) -> Level:
    """Take turns: a batch of ``concurrency`` without drafts, the same one with them."""
    times: list[list[float]] = [[], []]
    turn = cycle(prompts)
    for _ in range(rounds):
        batch = list(islice(turn, concurrency))
        for side, mine in zip(sides, times):
            start = time.perf_counter()
            tokens = serve(side.engine, batch, params)
            mine.append((time.perf_counter() - start) / tokens)
    return Level(concurrency, Sample(tuple(times[0])), Sample(tuple(times[1])))


def serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> int:
    """Answer all prompts together; the tokens generated. Raises RuntimeError where a request fails."""
    total, errors = 0, []

    def listen(update: Update) -> None:
        nonlocal total
        total += len(update.tokens)
        if update.error:
            errors.append(update.error)

    for prompt in prompts:
        engine.submit(Request(f"bench-{next(_names)}", prompt, params), listen)
    while engine.step():
        pass
    if errors:
        raise RuntimeError(f"a benchmark request failed: {errors[0]}")
    return total


def table(result: SpeculateResult) -> Table:
    """A row a load: tokens a second without and with drafts, and their ratio."""
    positions = " ".join(f"{share:.2f}" for share in result.by_position)
    caption = f"mean accepted length {result.mean_length:.2f}; accepted by position {positions}"
    made = Table(title=f"{result.name}: {result.drafts}; temperature {result.temperature:g}", caption=caption)
    for column in ("requests", "tokens/s without", "tokens/s with", "speed-up", "at least"):
        made.add_column(column, justify="right")
    for one in result.levels:
        made.add_row(
            str(one.concurrency),
            f"{1 / one.plain.median:.1f}",
            f"{1 / one.drafted.median:.1f}",
            f"{one.speedup:.2f}x",
            f"{one.worst:.2f}x",
        )
    return made

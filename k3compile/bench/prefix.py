"""What the prefix cache and its exported states are worth: one conversation of several turns, three ways.

    none            every turn is computed from its first token
    prefix_cache    a turn goes on from the last state that was kept; prompts are cut where one is to be kept
    state_export    the same, the state written inside the pass that crosses the place: no cut

Counted, which is exact anywhere: token rows, forward passes to the first token, states kept. Timed: the
first token. Every way has an engine of its own over the same weights, and they take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..cli.loading import Loaded, load
from ..options import CompileOptions
from ..runtime.checkpoint import make_checkpoint
from ..runtime.engine import Engine
from ..runtime.engine_config import EngineConfig
from ..runtime.request import Request
from ..runtime.sampling_params import SamplingParams
from ..serving import plan
from .limits import Sample
from .render import spread

WAYS = ("none", "prefix_cache", "state_export")
_names = count()


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation, one way. ``ttft``: seconds to the first token, a value a round."""

    prompt: int  # tokens
    cached: int  # of them, not run again
    rows: int  # token rows run until the first token
    passes: int
    ttft: Sample


@dataclass(frozen=True)
class PrefixResult:
    """All turns, each way. kept: states kept over all turns of one round."""

    name: str
    inner: str
    turns: dict[str, tuple[Turn, ...]]
    kept: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; seconds with quartiles."""
        return {
            "name": self.name,
            "inner": self.inner,
            "states_kept": self.kept,
            "turns": {
                way: [
                    {
                        "prompt_tokens": t.prompt,
                        "cached_tokens": t.cached,
                        "rows": t.rows,
                        "passes": t.passes,
                        "ttft_seconds": spread(t.ttft),
                    }
                    for t in turns
                ]
                for way, turns in self.turns.items()
            },
        }


def bench(
    preset: str,
    *,
    prompt: int = 8000,
    turns: int = 3,
    more: int = 100,
    reply: int = 24,
    rounds: int = 3,
    inner: str = "aot_eager",
    ways: Sequence[str] = WAYS,
    **engine: Any,
) -> PrefixResult:
    """Measure a preset or a checkpoint folder.

    prompt: tokens of the first turn. more: tokens that each later turn adds after the answer of ``reply``
    tokens. inner: what compiles; state_export is a pass. engine: further fields of EngineConfig. Raises
    ValueError for an unknown way and for a count below 1.
    """
    if unknown := sorted(set(ways) - set(WAYS)):
        raise ValueError(f"ways are {', '.join(WAYS)} (unknown: {', '.join(unknown)})")
    given = {"prompt": prompt, "turns": turns, "more": more, "reply": reply, "rounds": rounds}
    if small := [f"{name} must be at least 1, got {n}" for name, n in given.items() if n < 1]:
        raise ValueError("; ".join(small))
    longest = prompt + turns * (more + reply)
    config = EngineConfig(
        **{"max_num_batched_tokens": 8192, "max_num_seqs": 2, "max_model_len": longest + 1, **engine}
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(preset)
        if not directory.is_dir():
            directory = make_checkpoint(Path(folder) / preset, preset, seed=0)
        sides = {way: loaded(directory, way, config, inner) for way in ways}
    found: dict[str, list[list[tuple]]] = {way: [] for way in ways}
    kept = {}
    for round_ in range(rounds + 1):  # the first one warms up
        for way, side in sides.items():
            before = states(side.engine)
            told = talk(side, prompt, turns, more, reply, salt=f"round {round_}")
            kept[way] = states(side.engine) - before
            found[way] += [told] if round_ else []
    return PrefixResult(
        preset, inner, {way: tuple(map(merged, zip(*told))) for way, told in found.items()}, kept
    )


def loaded(directory: Path, way: str, config: EngineConfig, inner: str) -> Loaded:
    """A model with an engine of its own; compiled where a pass is wanted."""
    config = replace(config, prefix_cache=way != "none")
    exports = way == "state_export"
    serving = plan(config, CompileOptions(features="state_export" if exports else "baseline", inner=inner))
    made = load(directory, serving.engine)
    made.compile(serving.options)
    return made


def talk(side: Loaded, prompt: int, turns: int, more: int, reply: int, salt: str) -> list[tuple]:
    """One conversation: (prompt tokens, cached, rows, passes, seconds to the first token) of each turn."""
    generator = torch.Generator().manual_seed(0)

    def words(size: int) -> list[int]:
        return torch.randint(0, 256, (size,), generator=generator).tolist()

    tokens, out = words(prompt), []
    for _ in range(turns):
        request = Request(f"bench-{next(_names)}", tokens, params_of(reply), cache_salt=salt)
        told, answer = ask(side.engine, request)
        out.append(told)
        tokens = tokens + answer + words(more)
    return out


def states(engine: Engine) -> int:
    """States kept so far, those that had to go since among them."""
    return engine.cache.checkpoints.used + engine.stats().evicted_states


def params_of(reply: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=reply, ignore_eos=True)


def ask(engine: Engine, request: Request) -> tuple[tuple, list[int]]:
    """Serve one request: what :func:`talk` tells of it, and its answer."""
    answer: list[int] = []
    before = engine.stats()
    start = time.perf_counter()
    engine.submit(request, lambda update: answer.extend(update.tokens))
    while not answer:
        engine.step()
    spent, now = time.perf_counter() - start, engine.stats()
    while engine.step():
        pass
    counts = (request.prompt_tokens, request.cached_tokens, now.rows - before.rows, now.steps - before.steps)
    return (*counts, spent), answer


def merged(rounds: Sequence[tuple]) -> Turn:
    """The same turn of every round: the counts are the same, the times are a sample."""
    counts = {told[:4] for told in rounds}
    assert len(counts) == 1, f"a turn differs between rounds: {counts}"
    return Turn(*rounds[0][:4], Sample(tuple(told[4] for told in rounds)))


def table(result: PrefixResult) -> Table:
    """A row a turn and way."""
    made = Table(title=f"{result.name} under {result.inner}: one conversation")
    for column in ("turn", "way", "prompt", "cached", "rows run", "passes", "TTFT ms", "of none"):
        made.add_column(column, justify="left" if column == "way" else "right")
    for index in range(len(next(iter(result.turns.values())))):
        reference = result.turns.get("none")
        for way, turns in result.turns.items():
            turn = turns[index]
            ratio = f"{turn.ttft.median / reference[index].ttft.median:.2f}x" if reference else "-"
            counts = map(str, (turn.prompt, turn.cached, turn.rows, turn.passes))
            made.add_row(str(index + 1), way, *counts, f"{turn.ttft.median * 1e3:.1f}", ratio)
    made.caption = "states kept: " + ", ".join(f"{way} {n}" for way, n in result.kept.items())
    return made

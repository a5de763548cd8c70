"""What share of problems with one right answer a served model answers right, greedily and to the stop token.

    from k3compile.bench.recall import tasks, accuracy
    accuracy(LLM(folder), count=100, seed=7)     {"recall": 1.0, "long": 0.99, ...}

A number to compare: the same problems must be answered alike whatever a server has switched on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count as counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..runtime.engine import Engine, QueueFull, Update
from ..runtime.request import Request
from ..runtime.sampling_params import SamplingParams
from ..runtime.tokenizer import Tokenizer
from .recall_tasks import TASKS as tasks
from .recall_tasks import Problem, forms, generate

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["Problem", "accuracy", "answers", "bench", "forms", "generate", "right", "table", "tasks"]
SPARE = 4  # tokens that an answer may run past the right one before it is stopped
NAMES = counter()


def accuracy(
    model: LLM | Engine,
    tokenizer: Tokenizer | None = None,
    names: Sequence[str] = tasks,
    count: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """Task -> share of ``count`` fresh problems that are answered right.

    model: an LLM, or an engine that is not started (then with its tokenizer). All problems are served
    together, so batches mix tasks, lengths and forms. Raises ValueError for an unknown task, and RuntimeError
    for a request that the engine ends with an error.
    """
    engine = model if isinstance(model, Engine) else model.engine
    tokenizer = tokenizer or model.tokenizer
    problems = [problem for name in names for problem in generate(name, count, seed)]
    said = answers(engine, tokenizer, problems)
    hits = dict.fromkeys(names, 0)
    for problem, tokens in zip(problems, said):
        hits[problem.task] += right(problem, tokens, tokenizer)
    return {name: hit / count for name, hit in hits.items()}


def right(problem: Problem, tokens: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether these spell the answer and its stop token; one text may be cut into tokens in several ways."""
    return tokenizer.decode_bytes(tokens) == tokenizer.decode_bytes(problem.answer_ids(tokenizer))


def answers(engine: Engine, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[list[int]]:
    """The tokens that ``engine`` gives to each problem, in their order; it must not be started."""
    said: list[list[int]] = [[] for _ in problems]
    left = deque(enumerate(problems))
    running = 0

    def listener(at: int):
        def on_update(update: Update) -> None:
            nonlocal running
            if update.error:
                raise RuntimeError(f"problem {at}: {update.error}")
            said[at] += update.tokens
            running -= update.finish is not None

        return on_update

    while left or running:
        while left:
            at, problem = left[0]
            params = SamplingParams(temperature=0.0, max_tokens=len(problem.answer_ids(tokenizer)) + SPARE)
            request = Request(f"recall-{next(NAMES)}", problem.prompt_ids(tokenizer), params)
            try:
                engine.submit(request, listener(at))
            except QueueFull:
                break
            running += 1
            left.popleft()
        engine.step()
    return said


def bench(path: Path, count: int, seed: int, engine: Mapping[str, object]) -> dict[str, float]:
    """Accuracy of the checkpoint in ``path``, uncompiled, with these fields of EngineConfig."""
    from ..llm import LLM

    return accuracy(LLM(path, compile=False, **engine), count=count, seed=seed)


def table(shares: Mapping[str, float], count: int) -> Table:
    """One line a task."""
    out = Table(title=f"answered right, of {count} problems each")
    out.add_column("task")
    out.add_column("share", justify="right")
    for name, share in shares.items():
        out.add_row(name, f"{share:.1%}")
    return out

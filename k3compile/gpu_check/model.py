"""The trained tiny model, compiled, against its layers as they are written, on problems of its own tasks.

prompts --uncompiled, on this CPU--> tokens, and how far the runner-up was behind
        --compiled, on a device----> the same tokens, or the runner-up where the two were nearly even
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.recall_tasks import TASKS, generate
from ..cli.loading import SHIPPED, Loaded, load
from ..options import CompileOptions
from ..runtime.engine import Update
from ..runtime.engine_config import EngineConfig
from ..runtime.request import Request
from ..runtime.sampling_params import SamplingParams
from ..serving import plan

TIE = 1e-4  # of log-probabilities: design rule for float32
SETTINGS = {"max_model_len": 512, "max_num_seqs": 12, "prefix_cache": False}


class Answer(NamedTuple):
    """Greedy tokens, and of each the two likeliest with their log-probabilities."""

    tokens: list[int]
    best: list[tuple[tuple[int, float], ...]]


class Asked(NamedTuple):
    """A prompt and how many tokens its answer may have."""

    prompt: list[int]
    max_tokens: int


def questions(tokenizer: Any, of_each: int = 2, tasks: Sequence[str] = TASKS, most: int = 64) -> list[Asked]:
    """Problems of the model's own tasks; up to four tokens beyond the right answer, ``most`` at most."""
    problems = [p for task in tasks for p in generate(task, of_each)]
    room = [min(most, len(p.answer_ids(tokenizer)) + 4) for p in problems]
    return [Asked(p.prompt_ids(tokenizer), n) for p, n in zip(problems, room)]


def loaded(device: str = "cpu", checkpoint: Path = SHIPPED, dtype: str = "float32") -> Loaded:
    """The model with an engine that is not started."""
    return load(checkpoint, EngineConfig(**SETTINGS), dtype, device=device)


def ask(model: Loaded, asked: Sequence[Asked]) -> list[Answer]:
    """Answers to all prompts at once. Raises RuntimeError for a request that ends in an error."""
    answers = [Answer([], []) for _ in asked]

    def listen(update: Update) -> None:
        if update.error:
            raise RuntimeError(f"prompt {update.request_id}: {update.error}")
        answer = answers[int(update.request_id)]
        answer.tokens.extend(update.tokens)
        answer.best.extend(entry.top for entry in update.logprobs or [])

    for i, one in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens, logprobs=2)
        model.engine.submit(Request(str(i), one.prompt, params), listen)
    while model.engine.step():
        pass
    return answers


def difference(here: Answer, there: Answer) -> str:
    """ "same", "tie" (the runner-up, within 1e-4), or where the answers part."""
    for at, (a, b) in enumerate(zip(here.tokens, there.tokens)):
        if a != b:
            (_, first), (runner_up, second) = here.best[at]
            if b == runner_up and first - second < TIE:
                return "tie"
            return f"token {at} is {b} and not {a}"
    return "same" if len(here.tokens) == len(there.tokens) else "lengths differ"


def check(
    device: str,
    inner: str = "inductor",
    of_each: int = 2,
    tasks: Sequence[str] = TASKS,
    most_tokens: int = 64,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compile for ``device`` with backend k3 and compare. choices: what computes each op there."""
    plain = loaded()
    asked = questions(plain.tokenizer, of_each, tasks, most_tokens)
    expected = ask(plain, asked)
    started = time.perf_counter()
    model = loaded(device)
    options = plan(EngineConfig(**SETTINGS), CompileOptions(inner=inner), checkpoint=SHIPPED).options
    forward = model.compile(options)
    compiled = time.perf_counter() - started
    say(f"compiled to {forward.graphs()} graphs in {compiled:.0f} s; it now answers {len(asked)} prompts")
    found = [difference(a, b) for a, b in zip(expected, ask(model, asked))]
    choices: dict[str, list[str]] = {}
    for report in forward.reports:
        for op, said in report.choices.items():
            if said not in choices.setdefault(op, []):
                choices[op].append(said)
    return {
        "prompts": len(asked),
        "same": found.count("same"),
        "tie": found.count("tie"),
        "wrong": [f"prompt {i}: {f}" for i, f in enumerate(found) if f not in ("same", "tie")],
        "graphs": forward.graphs(),
        "compile_seconds": compiled,
        "choices": choices,
    }

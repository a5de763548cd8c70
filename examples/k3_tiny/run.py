"""The whole training run: what is learned when, how fast, and what is kept on the way.

progress   0 ...... 0.1 ................ 0.4 ........................ 1
rows       short    + chats that think, a tool      + long lists
pairs      4 -> 20
rate       rises    stays                           falls to nothing

The package's own model was trained by these parts, 3306 steps in 71 minutes on one core, while the shares of
the problems were still being found; this is where they ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from k3compile.runtime.presets import PRESETS
from k3compile.runtime.tokenizer import Tokenizer

from k3compile import LLM
from k3compile.bench.recall import accuracy

from .draft import train_draft
from .export import export, tiny, write_tokenizer
from .forward import AS_IT_STANDS, compiled
from .optimiser import Optimiser
from .rows import Rows, batch
from .training import Report, shares, step
from .weights import initial

LENGTHS = {"short": 128, "thinking": 256, "tool": 256, "long": 512}
TOKENS = 2048  # of a step: one size, so that few graphs are compiled
RATE, ADAM_RATE = 0.006, 0.004
DRAFTS = 7  # a request, when the end is judged
MAIN = 0.9  # of the time; the rest is the draft's
KEEP_EVERY, JUDGE_EVERY, SAY_EVERY = 100, 200, 20  # steps


@dataclass(frozen=True)
class Plan:
    """How long and from what."""

    steps: int = 4000
    minutes: float = 60.0
    draft_steps: int = 1000
    problems: int = 200
    seed: int = 0
    eager: bool = False


class Run:
    """What a run knows, and what it keeps in a file so that another process can go on."""

    def __init__(self, out: Path, plan: Plan) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_tokenizer(out, PRESETS["tiny"])
        self.plan, self.config, self.tokenizer = plan, tiny(), Tokenizer(out)
        self.master = initial(self.config, plan.seed)
        self.optimiser = Optimiser(self.master)
        self.file = out.with_name(out.name + ".training")
        self.done, self.begin = 0, time.monotonic()
        self.fast = self.slow = None
        if not plan.eager:
            self.fast = compiled()  # of the most common length; the others are not worth another compile
            self.slow = self.fast._replace(kda=AS_IT_STANDS.kda, mla=AS_IT_STANDS.mla)

    @property
    def spent(self) -> float:
        """Minutes so far, those of the processes before included."""
        return (time.monotonic() - self.begin) / 60

    @property
    def progress(self) -> float:
        return max(self.done / self.plan.steps, self.spent / (MAIN * self.plan.minutes))

    def keep(self) -> None:
        state = {"done": self.done, "spent": self.spent, "master": self.master}
        beside = self.file.with_name(self.file.name + ".part")
        torch.save(state | {"optimiser": self.optimiser.state()}, beside)
        beside.replace(self.file)

    def go_on(self) -> None:
        """Raises ValueError when nothing was kept."""
        if not self.file.exists():
            raise ValueError(f"there is no {self.file} to go on from: leave --resume out")
        state = torch.load(self.file, weights_only=True)
        self.done, self.begin = state["done"], time.monotonic() - 60 * state["spent"]
        for name, value in state["master"].items():
            self.master[name].copy_(value)
        self.optimiser.load(state["optimiser"])

    def step(self) -> Report:
        progress = self.progress
        rows = lesson(self.tokenizer, self.plan.seed, self.done, progress)
        pieces = self.fast if rows.tokens.shape[1] == LENGTHS["short"] else self.slow
        speed = pace(progress)
        self.done += 1
        rates = RATE * speed, ADAM_RATE * speed
        return step(self.config, self.master, self.optimiser, [rows], *rates, pieces)

    def shares(self, count: int, seed: int) -> str:
        found = shares(self.config, self.master, self.tokenizer, count, seed)
        return ", ".join(f"{task} {share:.1%}" for task, share in found.items())


def train(out: Path, plan: Plan, resume: bool, say: Callable[[str], None]) -> None:
    """Train, export into ``out``, then its draft. Raises ValueError when there is nothing to resume."""
    run = Run(out, plan)
    if resume:
        run.go_on()
    while run.progress < 1:
        report = run.step()
        if run.done % SAY_EVERY == 0:
            say(
                f"step {run.done} of {plan.steps}, {run.spent:.1f} min: loss {report.loss:.4f}, "
                f"{report.right:.1%} of tokens, gradient {report.norm:.2f}, rate {pace(run.progress):.3f}"
            )
        if run.done % KEEP_EVERY == 0:
            run.keep()
        if run.done % JUDGE_EVERY == 0:
            say("  right: " + run.shares(32, run.done))
    run.keep()
    export(out, run.master)
    say(f"{run.done} steps, {run.done * TOKENS:,} tokens in {run.spent:.1f} min")
    train_draft(out, plan.draft_steps, plan.minutes - run.spent, plan.seed, say)
    judge(out, plan.problems, say)


def judge(out: Path, problems: int, say: Callable[[str], None]) -> None:
    """What the files hold, served: share of problems answered right, and how many drafts are accepted."""
    llm = LLM(out, compile=False, max_num_seqs=16, num_drafts=DRAFTS)
    for task, share in accuracy(llm, count=problems, seed=-1).items():
        say(f"{task}: {share:.1%} of {problems} right")
    say(f"mean accepted length with {DRAFTS} drafts: {llm.engine.stats().accepted_length:.2f}")


def lesson(tokenizer: Tokenizer, seed: int, done: int, progress: float) -> Rows:
    """The rows of one step; the same for the same arguments."""
    rng = random.Random(f"{seed} {done}")
    weights = (10, 3 * (progress > 0.1), 2 * (progress > 0.1), 3 * (progress > 0.4))
    if progress > 0.85:
        weights = (6, 2, 1, 5)  # long lists are what is right last
    [kind] = rng.choices(list(LENGTHS), weights)
    most = min(20, 4 + done // 25)
    return batch(tokenizer, kind, TOKENS // LENGTHS[kind], LENGTHS[kind], rng, most)


def pace(progress: float) -> float:
    """Share of the full rate."""
    return min(1.0, progress / 0.01 + 0.02, (1 - progress) / 0.6)

"""An engine on rank 0 and followers beside it, on threads: the same traffic on one rank and on several.

parts = Parts(state_replay=..)         a small K3 and a draft whose parts divide by 2 and by 4
alone = led(1, parts, config, work)    work(engine) -> what it heard, on one rank
led(4, parts, config, work)            the same on four: Led.answers, .pools, .commands, .collectives by rank
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from draft_reference import small_draft
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.engine import Engine
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine, make_follower
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.channel import Channel
from k3compile.runtime.parallel.follow import follow
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.parallel.ranks import Ranks, world
from k3compile.runtime.parallel.recorder import Mark, Recorder
from k3compile.runtime.parallel.sharding import DRAFT, HEAD, TARGET, Shard, part_of, split_of
from k3compile.runtime.speculate.dspark_model import DSparkModel
from small_models import dealt, small_model
from threaded_ranks import on_threads
from torch.testing._internal.distributed import multi_threaded_pg as threaded

FOUR = dealt(4)
TAPS = (0, 2, 3)


class Parts:
    """The whole target and, where asked for, a draft; each rank cuts its own part out."""

    def __init__(self, state_replay: bool = True, draft: bool = False) -> None:
        self.target = small_model(FOUR, state_replay=state_replay, tap_layers=TAPS if draft else ())
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        self.draft = small_draft(FOUR, **heads) if draft else None

    def model_of(self, ranks: Ranks) -> Model:
        whole = self.target
        made = Model(
            FOUR, torch.float64, tap_layers=whole.tap_layers, state_replay=whole.state_replay, ranks=ranks
        )
        return cut(whole, made, TARGET, ranks)

    def draft_of(self, ranks: Ranks) -> DSparkModel | None:
        if self.draft is None:
            return None
        return cut(self.draft, DSparkModel(self.draft.config, torch.float64, ranks=ranks), DRAFT, ranks)


def cut(whole: Any, made: Any, table: Any, ranks: Ranks) -> Any:
    """Fill ``made`` with a rank's part of ``whole``."""
    full = dict(whole.named_parameters())
    for name, parameter in made.named_parameters():
        parameter.copy_(part_of(full[name], split_of(table, name), ranks))
    return made


class Led(NamedTuple):
    """What came of a run. All but ``answers`` by rank."""

    answers: Any  # of ``work``
    pools: list[Any]
    commands: list[list[tuple[int, str]]]  # number and kind
    collectives: list[list[str]]


class Watch(Unwatched):
    """Notes the commands of a rank and compares the digest of its collectives with rank 0's."""

    def __init__(self, mine: PerThread) -> None:
        self.commands: list[tuple[int, str]] = []
        self.recorders = mine

    @contextmanager
    def step(self, kind: str, rows: int = 0):
        self.commands.append((len(self.commands) + 1, kind))
        yield

    def mark(self) -> Mark:
        return self.recorders.own().mark()

    def check(self, mine: Mark, leaders: Mark) -> None:
        assert mine == leaders, f"{mine} here, {leaders} on rank 0"


def shapes_in(arguments: Any) -> Iterator[tuple]:
    """(shape, dtype) of each tensor, in lists too."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield tuple(one.shape), one.dtype
        elif isinstance(one, list):
            yield from shapes_in(one)


class PerThread:
    """A recorder for each thread: a process has one, which hears nothing of ranks that are threads."""

    HEARD = ("allreduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single")

    def __init__(self) -> None:
        self._local = threading.local()

    def own(self) -> Recorder:
        if not hasattr(self._local, "recorder"):
            self._local.recorder = Recorder(kept=1 << 20)
        return self._local.recorder

    @contextmanager
    def hearing(self):
        """Inside, each thread's collectives are written down."""
        kind = threaded.ProcessLocalGroup
        before = {name: getattr(kind, name) for name in self.HEARD}
        for name, call in before.items():
            setattr(kind, name, self._heard(name, call))
        try:
            yield
        finally:
            for name, call in before.items():
                setattr(kind, name, call)

    def _heard(self, name: str, call: Callable) -> Callable:
        def heard(group, *arguments):
            self.own().add(name, tuple(shapes_in(arguments)), group.size())
            return call(group, *arguments)

        return heard


Work = Callable[[Engine], Any]


def led(
    ranks: int,
    parts: Parts,
    config: EngineConfig,
    work: Work,
    drafter: Callable[[], Any] | None = None,
    context: int = 1,
) -> Led:
    """``work(engine)`` on rank 0 of so many, with followers where there are several, until it stops."""
    if ranks == 1:
        engine = make_engine(parts.target, config, None, parts.draft, drafter() if drafter else None)
        answers = work(engine)
        engine.stop()
        return Led(answers, [engine.pools], [], [])
    recorders = PerThread()

    def run(rank: int) -> tuple:
        own = world(context)
        watch, channel = Watch(recorders), Channel(dist.new_group())
        model, draft, answers = parts.model_of(own), parts.draft_of(own), None
        if rank:
            executor = make_follower(model, config, None, draft)
            follow(executor, channel, watch)
        else:
            made = drafter() if drafter else None
            engine = make_engine(
                model, config, None, draft, made, lambda executor: Leader(executor, channel, watch)
            )
            answers, executor = work(engine), engine.executor
            engine.stop()
        listed = [f"{place} {text}" for place, text in recorders.own().entries()]
        return answers, executor.pools, watch.commands, listed

    with recorders.hearing():
        answers, *columns = zip(*on_threads(ranks, run, timeout_s=240))
    return Led(answers[0], *map(list, columns))


def assert_alike(several: Led, alone: Led, context: int = 1) -> None:
    """Answers are those of one rank, every rank did the same, and each has its part of what one rank has."""
    assert several.answers == alone.answers
    assert_together(several)
    for rank, pools in enumerate(several.pools):
        for i, (mine, whole) in enumerate(zip(pools, alone.pools[0], strict=True)):
            for name, got, full in zip(mine._fields, mine, whole, strict=True):
                ranks = Ranks(rank, len(several.pools), "", context)
                want = part_of_pool(type(mine) is KdaPools, name, full, ranks)
                if name == "pages" and got.shape[1] * context == full.shape[1]:  # a draft's are whole
                    want = full[:, ranks.context_rank :: context]
                where = f"rank {rank}, layer {i}, {name}"
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True, msg=where)


def assert_together(several: Led) -> None:
    """Every rank got the same commands and made the same collectives, in one order."""
    assert several.commands[0][-1][1] == "stop"
    assert several.collectives[0]
    assert all(commands == several.commands[0] for commands in several.commands)
    assert all(collectives == several.collectives[0] for collectives in several.collectives)


def part_of_pool(kda: bool, name: str, full: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A rank's heads of a tensor of one rank; latents are whole on each."""
    if not kda:
        return full
    channels = name in ("window", "rec_x")  # q, k and v of all heads
    dim = full.dim() - 1 if channels else {"state": 1}.get(name, 2)
    return part_of(full, Shard(dim, HEAD, blocks=3 if channels else 1), ranks)

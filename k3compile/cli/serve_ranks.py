"""One rank of several that serve a model: they meet, compare, load, compile, and then rank 0 leads.

    rank 0    meet  agree  join  load  compile  ready | engine, the port answers ... stop | leave
    others    meet  agree  join  load  compile  ready | do what rank 0 says ............. | leave
                           |<------------- watched, so that none waits for one that is gone -->|

Compilation comes before the port answers: its warm-up runs collectives, and behind a server they would come
from a second thread, in no order that the ranks share.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..runtime.config import K3Config
from ..runtime.executor import Executor, ForwardFn
from ..runtime.make_engine import make_engine, make_follower
from ..runtime.parallel import beats, launch, sharding
from ..runtime.parallel.agreement import Meeting
from ..runtime.parallel.channel import Channel, open_channel
from ..runtime.parallel.farewell import INTERRUPTED
from ..runtime.parallel.follow import follow
from ..runtime.parallel.lead import Leader
from ..runtime.parallel.recorder import Recorder, hearing
from ..runtime.parallel.watch import Watch
from ..runtime.parallel.watch_config import WatchConfig
from ..runtime.server.server_config import ServerConfig
from ..runtime.speculate.dspark_config import DSparkConfig
from ..statement import computed_by, statement, whole_weights
from .door import Asked, answer, leave, open_door
from .loading import Weights, load_weights
from .main import fail

if TYPE_CHECKING:
    import socket

    from ..forward import CompiledForward

log = logging.getLogger(__name__)

DRAIN_S = 24.0  # for running answers, where nobody said how long: torchrun kills after 30 s
INTERRUPTED_S = 1.5  # for the others to hear of it


class Rank(NamedTuple):
    """This rank once all have joined: what it was asked, who watches it, its part of the weights."""

    asked: Asked
    meeting: Meeting
    watch: Watch
    channel: Channel
    weights: Weights


def serve_together(seat: launch.Seat, ask: Callable[[], Asked]) -> NoReturn:
    """Serve as one rank of ``seat.size`` and end the process. ask: reads the options.

    What one rank cannot do ends all of them before anything is served, each with that message and code 2.
    """
    try:
        meeting = launch.meet(seat)
        with starting(meeting):
            asked = ask()
            check_shares(asked)
            compile_of(asked)
            listener = open_door(asked) if seat.rank == 0 else None
            how = asked.dtype, asked.resident, asked.compiled, asked.patience
            device = launch.device_of(seat, asked.device)
            meeting.agree(statement(asked.checkpoint, asked.serving, *how, device))
        with watched(meeting, asked.patience) as watch:
            rank = gather(asked, seat, device, meeting, watch)
            if listener is None:
                follow_rank_0(rank)
            else:
                lead_ranks(rank, listener)
    except ValueError as error:
        with suppress(SystemExit):
            fail(f"rank {seat.rank}: {error}" if seat.rank else str(error))
        leave(2)  # at once: rank 0 ends those that take long to go
    except KeyboardInterrupt:  # outside what is told to the others: they miss this process
        log.warning("rank %d %s", seat.rank, beats.WAS_INTERRUPTED)
        leave(INTERRUPTED)
    leave()


@contextmanager
def starting(meeting: Meeting) -> Iterator[None]:
    """Inside, whatever ends this rank is told to the others. SIGINT ends it there and then: an exception
    would go through a compiler that catches it, and through waits for ranks that were interrupted as well.
    """

    def interrupted() -> NoReturn:
        said = f"rank {meeting.rank} {beats.WAS_INTERRUPTED}"
        log.warning("%s", said)
        logging.disable(logging.CRITICAL)  # the watch would say it again
        try:
            with suppress(RuntimeError):  # the store has gone
                dist.PrefixStore("watch", meeting.store).compare_set(beats.TROUBLE, beats.QUIET, said)
            meeting.tell("it was interrupted", INTERRUPTED_S)
            leave(INTERRUPTED)
        finally:
            logging.disable(logging.NOTSET)

    with launch.on_interrupt(interrupted, lambda: leave(INTERRUPTED), 2 * INTERRUPTED_S), meeting.telling():
        yield


def check_shares(asked: Asked) -> None:
    """Raise ValueError listing what so many ranks cannot divide of the model and its draft."""
    serving = asked.serving
    config = K3Config.from_file(asked.checkpoint)
    drafting = serving.engine.num_drafts and serving.draft is not None
    draft = DSparkConfig.from_file(serving.draft, config) if drafting else None
    sharding.check(config, serving.ranks, serving.context_ranks, serving.engine.page_size, draft)


@contextmanager
def watched(meeting: Meeting, patience: WatchConfig) -> Iterator[Watch]:
    """Inside, a rank that is gone, stands still or makes other collectives ends all of them."""
    with hearing(Recorder()) as recorder:
        store = dist.PrefixStore("watch", meeting.store.clone())
        watch = Watch(store, meeting.rank, meeting.size, patience, recorder)
        watch.start()
        try:
            yield watch
        finally:
            watch.close()


def gather(asked: Asked, seat: launch.Seat, device: torch.device, meeting: Meeting, watch: Watch) -> Rank:
    """Make the process groups and load this rank's part onto its device."""
    serving = asked.serving
    with starting(meeting), watch.step("load"):
        ranks = launch.join(seat, meeting, device, serving.context_ranks)
        channel = open_channel()
        files = asked.checkpoint, serving.engine, asked.dtype, asked.resident, serving.draft
        weights = load_weights(*files, ranks=ranks, device=device, meeting=meeting)
        meeting.agree(whole_weights(weights.model, weights.draft), "loaded")
    return Rank(asked, meeting, watch, channel, weights)


def compile_of(asked: Asked) -> Callable[..., CompiledForward] | None:
    """What compiles on every rank; None where it runs as it is written, and torch's compiler, which makes
    its cache folder as soon as it is imported, is left alone.

    Raises ValueError where that folder cannot be made.
    """
    if not asked.compiled:
        return None
    try:
        from ..forward import compile_forward
    except OSError as error:
        raise ValueError(
            f"cannot compile: the compiler's cache {error.filename}: {error.strerror}; set "
            "TORCHINDUCTOR_CACHE_DIR to a folder that can be written, or serve with --no-compile"
        ) from None
    return compile_forward


def compiler(asked: Asked) -> Callable[[Any, Any], ForwardFn] | None:
    """What compiles (model, its own pools), on every rank at once; None where it runs as it is written."""
    compile_forward = compile_of(asked)
    if compile_forward is None:
        return None

    def compiled(model: Any, pools: Any) -> ForwardFn:
        log.info("compiling before the port answers, which takes minutes when nothing is cached")
        made = compile_forward(model, pools, asked.serving.options, asked.serving.engine.max_num_seqs)
        log.info("compiled: %d graphs in %.1f s", made.graphs(), made.seconds)
        return made

    return compiled


def ready(meeting: Meeting, executor: Executor) -> None:
    """Wait until every rank has its pools and its compiled model, with pools of the same shapes as here and
    the same implementations of ops.
    """
    layers = enumerate(executor.pools)
    shapes = {str(i): [f"{list(t.shape)} {t.dtype}" for t in layer if t is not None] for i, layer in layers}
    computed = computed_by(getattr(executor.forward, "reports", ()))
    facts = {"pools of layer": shapes, "exports": executor.exports, "computed": computed}
    meeting.agree(facts, "ready")


def follow_rank_0(rank: Rank) -> None:
    """Do what rank 0 says until it says stop. Whatever goes wrong in between ends all ranks."""
    config, (model, draft, _) = rank.asked.serving.engine, rank.weights
    with getting_ready(rank):
        executor = make_follower(model, config, compiler(rank.asked), draft)
    with launch.deaf():
        ready(rank.meeting, executor)
        try:
            follow(executor, rank.channel, rank.watch)
        except Exception as error:  # of any kind: what matters is that nobody waits for this rank
            end_all(rank, "cannot follow", error)


def lead_ranks(rank: Rank, listener: socket.socket) -> None:
    """Serve clients with all ranks until a signal."""
    config, (model, draft, tokenizer) = rank.asked.serving.engine, rank.weights

    def lead(executor: Executor) -> Leader:
        ready(rank.meeting, executor)
        return Leader(executor, rank.channel, rank.watch)

    with getting_ready(rank):
        engine = make_engine(model, config, compiler(rank.asked), draft, lead=lead)
    rank.watch.on_trouble(engine.fail)
    asked = rank.asked._replace(server=in_time(rank.asked.server))
    try:
        answer(asked, engine, tokenizer, listener)
    finally:
        engine.stop()  # waits for the step that runs, as the others are in it, and lets them end


def in_time(server: ServerConfig) -> ServerConfig:
    """Settings with which the drain ends before torchrun gives up on it."""
    if server.drain_s == ServerConfig.drain_s:
        return dataclasses.replace(server, drain_s=DRAIN_S)
    if server.drain_s > DRAIN_S:
        log.warning(
            "--drain-s %g: torchrun kills what has not ended 30 s after its signal; start it with "
            "--shutdown-timeout %g or more",
            server.drain_s,
            server.drain_s + 30 - DRAIN_S,
        )
    return server


@contextmanager
def getting_ready(rank: Rank) -> Iterator[None]:
    """Inside, this rank makes pools and compiles. A wrong setting is told to the others, who find the same;
    of a compiler's failure they hear from the watch, as they wait for this rank in a collective.
    """
    with starting(rank.meeting), rank.watch.step("compile"):
        try:
            yield
        except ValueError:
            raise
        except Exception as error:  # whatever a compiler raises
            end_all(rank, "could not get ready", error)


def end_all(rank: Rank, what: str, error: Exception) -> NoReturn:
    """End every rank: this one as soon as its watch has told the others."""
    log.debug("%s", what, exc_info=error)
    rank.watch.report(f"rank {rank.meeting.rank} {what}: {type(error).__name__}: {error}")
    time.sleep(30)
    leave(1)

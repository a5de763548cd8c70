"""One rank of an engine, as a process of its own over gloo: led_processes.py RANK RANKS FOLDER [STEP].

Rank 0 serves a few requests and writes what they got into FOLDER/answers.json, the others follow. STEP: the
pass at which the last rank's forward fails. Each rank writes its list of collectives into FOLDER/RANK.txt.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine, make_follower
from k3compile.runtime.parallel.channel import open_channel
from k3compile.runtime.parallel.divergence import compare
from k3compile.runtime.parallel.follow import follow
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.parallel.ranks import world
from k3compile.runtime.parallel.recorder import Mark, Recorder, hearing
from k3compile.runtime.request import Request, SamplingParams
from led_ranks import Parts

CONFIG = EngineConfig(
    max_num_batched_tokens=64, page_size=16, num_pages=40, max_num_seqs=4, max_model_len=256, num_drafts=3
)


class Watch(Unwatched):
    """Compares every mark."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def mark(self) -> Mark:
        return self.recorder.mark()

    def check(self, mine: Mark, leaders: Mark) -> None:
        compare(dist.get_rank(), mine, leaders, self.recorder.entries(), None)


def serve(engine) -> dict[str, list]:
    """Tokens and error of each request; the engine runs on its own thread."""
    got = {str(i): [[], None] for i in range(3)}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def listen(update):
        got[update.request_id][0] += update.tokens
        got[update.request_id][1] = update.error

    for i, length in enumerate((1, 40, 90)):
        engine.submit(Request(str(i), [(31 * i + 5 * j + j * j) % 90 for j in range(length)], params), listen)
    engine.start()
    engine.stop(drain_s=60)
    return got


def failing(forward, at: int):
    """``forward``, which raises at its pass number ``at``."""
    passes = iter(range(1, 1 << 20))

    def run(step):
        if next(passes) == at:
            raise RuntimeError("a fault of this rank alone")
        return forward(step)

    return run


def main(rank: int, ranks: int, folder: Path, fails: int) -> None:
    torch.set_num_threads(1)
    parts = Parts(draft=True)  # of a group of one, which goes again
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    own = world()
    model, draft = parts.model_of(own), parts.draft_of(own)
    with torch.no_grad(), hearing(Recorder()) as recorder:
        channel, watch = open_channel(), Watch(recorder)
        if rank == 0:
            lead = partial(Leader, channel=channel, watch=watch)
            engine = make_engine(model, CONFIG, None, draft, lead=lead)
            got = serve(engine)
            (folder / "answers.json").write_text(json.dumps([got, engine.stats().last_error]))
        else:
            executor = make_follower(model, CONFIG, None, draft)
            if fails and rank == ranks - 1:
                executor.forwards[0] = failing(executor.forward, fails)
            follow(executor, channel, watch)
        (folder / f"{rank}.txt").write_text("\n".join(entry.text for entry in recorder.entries()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)

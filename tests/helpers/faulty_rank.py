"""One rank of `k3 serve` that meets with a mishap at a chosen moment; a script for torchrun in a test.

torchrun --nproc-per-node 2 faulty_rank.py FILE FAULT PHASE RANK [options of k3 serve]

    fault   killed (SIGKILL), stopped (SIGSTOP), delayed (asleep for ten minutes), diverges (one call more,
            in a group of its own, so that nothing hangs of it)
    phase   load      before the weights are read
            prefill   inside the first pass that has a prompt in it after one that has none, after its fourth
                      collective
            decode    inside the tenth pass that decodes for all clients, after its fourth collective
            commit    after as many of those; rank 0: before the books of a step are closed; others: before
                      states are settled

FILE gets the time of the mishap when it happens. Everything else is the product as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from k3compile.runtime.executor import Executor
from k3compile.runtime.parallel.recorder import Recorder
from k3compile.runtime.scheduler import Scheduler

from k3compile.cli.main import main

DECODES, COLLECTIVES = 10, 4
CLIENTS = 4  # of FaultyJob.traffic: a mishap that comes before all are in leaves some with a closed port


class Mishap:
    """Happens once. passes: how many of each kind this rank has begun; armed: collectives until it comes."""

    def __init__(self, file: str, fault: str) -> None:
        self.file, self.fault = Path(file), fault
        self.passes = {"prefill": 0, "decode": 0, "together": 0}
        self.armed = 0
        self.done = False

    def happen(self) -> None:
        if self.done:
            return
        self.done = True
        part = self.file.with_suffix(".part")
        part.write_text(str(time.time()))
        part.rename(self.file)
        if self.fault == "diverges":
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            dist.all_reduce(torch.zeros(3), group=alone)
            return
        if self.fault == "delayed":
            time.sleep(600)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[self.fault])

    def count(self, step) -> str:
        """The kind of a pass that begins."""
        kind = "prefill" if int(step.spans[2]) else "decode"
        self.passes[kind] += 1
        self.passes["together"] += kind == "decode" and len(step.slots) >= CLIENTS
        return kind

    def during(self, phase: str) -> None:
        """Inside a pass, after some collectives."""
        begun, enough = {"prefill": ("decode", 1), "decode": ("together", DECODES)}[phase]
        run, add = Executor.run, Recorder.add

        def counted(executor, step, *rest):
            if self.count(step) == phase and self.passes[begun] >= enough and not self.armed:
                self.armed = COLLECTIVES + 1
            return run(executor, step, *rest)

        def added(recorder, *call):
            if self.armed:
                self.armed -= 1
                if not self.armed:
                    self.happen()
            return add(recorder, *call)

        Executor.run, Recorder.add = counted, added

    def before(self, where: type, name: str) -> None:
        """Before a call, once there were enough decode steps."""
        run, call = Executor.run, getattr(where, name)

        def counted(executor, step, *rest):
            self.count(step)
            return run(executor, step, *rest)

        def called(thing, given):
            if self.passes["together"] >= DECODES and given:
                self.happen()
            return call(thing, given)

        Executor.run = counted
        setattr(where, name, called)


def arrange(mishap: Mishap, phase: str, rank: int) -> None:
    if phase == "load":
        from k3compile.cli import serve_ranks

        load = serve_ranks.load_weights

        def loaded(*given, **named):
            mishap.happen()
            return load(*given, **named)

        serve_ranks.load_weights = loaded
    elif phase == "commit":
        mishap.before(*((Executor, "write") if rank else (Scheduler, "commit")))
    else:
        mishap.during(phase)


if __name__ == "__main__":
    file, fault, phase, rank, *options = sys.argv[1:]
    if fault != "none" and os.environ["RANK"] == rank:
        arrange(Mishap(file, fault), phase, int(rank))
    sys.argv[1:] = options
    main(["serve", *options])

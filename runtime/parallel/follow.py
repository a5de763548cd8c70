"""What the other ranks do: whatever rank 0 says, in its order, until it says stop.

    receive -> the pools' changes -> the pass -> receive -> ...

A follower has no scheduler, no cache books and no sampler. It looks at a command only to see that both ranks
are at the same place.
"""

from __future__ import annotations

import torch

from ..executor import Executor
from .channel import Channel
from .hooks import Unwatched
from .wire import Ask, Command, Malformed, Run, Stop, decode


@torch.no_grad()
def follow(executor: Executor, channel: Channel, watch: Unwatched | None = None) -> None:
    """Obey rank 0 until it says stop; returns then.

    executor: of make_engine.make_follower. watch: told of every command. Raises whatever a command raises
    here, :class:`wire.Malformed` for one that is not the next, and RuntimeError when rank 0 is gone: whoever
    runs this must end the process, for the others wait for it.
    """
    watch = watch or Unwatched()
    steps, kind = 0, "waiting for the first"
    while True:
        try:
            mark = watch.mark()
            command = decode(channel.receive())
            steps, kind = steps + 1, command.kind
            if command.step != steps:
                raise Malformed(f"command {command.step} came where {steps} was due")
            watch.check(mark, command.mark)
            with watch.step(kind, command.rows):
                obey(executor, command)
        except Exception as error:
            error.add_note(f"this rank follows and ends here, after {steps} commands, the last one: {kind}")
            raise
        if isinstance(command.body, Stop):
            return


def obey(executor: Executor, command: Command) -> None:
    """One command's part of this rank. What comes out is rank 0's to use."""
    executor.write(command.changes)
    body = command.body
    if isinstance(body, Run):
        take_forward(executor, body)
        learns = body.observe and executor.blocks is not None
        executor.run(body.step, body.logit_rows, body.copies, executor.blocks.observe if learns else None)
    elif isinstance(body, Ask):
        executor.draft(*body)
    else:
        executor.stop()


def take_forward(executor: Executor, run: Run) -> None:
    """Use the forward that rank 0 uses. Raises ValueError where this rank has none like it."""
    if run.forward >= len(executor.forwards):
        raise ValueError(
            f"rank 0 runs forward {run.forward}, and this rank was given {len(executor.forwards)}: give each "
            "rank its own before rank 0 uses one"
        )
    executor.number = run.forward
    if executor.exports != run.exports:
        raise ValueError(
            f"the forward of rank 0 {'leaves' if run.exports else 'does not leave'} checkpoints inside a "
            "prompt, and this rank's does otherwise: compile both with the same options"
        )

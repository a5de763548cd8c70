"""Commands of every length arrive, in one broadcast where they are short and in two where they are not."""

import pytest
import torch
import torch.distributed as dist
from k3compile.runtime.parallel.channel import FIRST, Channel
from k3compile.runtime.parallel.recorder import Mark
from k3compile.runtime.parallel.wire import HEAD, Ask, Command, Malformed, encode
from threaded_ranks import on_threads

SHORTEST = HEAD + 2  # of one request without pages


def command_of(length: int) -> torch.Tensor:
    """A command of so many numbers."""
    one = torch.ones(1, dtype=torch.int64)
    return encode(Command(1, Mark(0, 0), [], Ask(one, one, torch.arange(length - SHORTEST)[None])))


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_arrives_whatever_its_length(ranks, monkeypatch):
    lengths = [SHORTEST, FIRST - 1, FIRST, FIRST + 1, 3 * FIRST]
    counted, broadcast = [], dist.broadcast

    def watched(numbers, source, group):
        if dist.get_rank() == 1:
            counted.append(len(numbers))
        broadcast(numbers, source, group)

    monkeypatch.setattr(dist, "broadcast", watched)

    def work(rank: int) -> None:
        channel = Channel(dist.new_group())
        for length in lengths:
            sent = command_of(length)
            if rank == 0:
                channel.send(sent)
            else:
                assert torch.equal(channel.receive(), sent)

    on_threads(ranks, work)
    assert counted == [FIRST, FIRST, FIRST, FIRST, 1, FIRST, 2 * FIRST]


def test_another_programs_numbers_are_refused_and_not_waited_for():
    def work(rank: int) -> None:
        channel = Channel()
        if rank == 0:
            channel.send(torch.full((FIRST,), 1 << 40))
            return
        with pytest.raises(Malformed, match="no command"):
            channel.receive()

    on_threads(2, work)

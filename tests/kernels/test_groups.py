"""A group is known by its name, and a process by its place in it."""

import torch.distributed as dist
from k3compile.kernels.groups import place_in, ranks_of
from threaded_ranks import on_threads


def test_each_rank_finds_its_own_place():
    def work(rank):
        name = dist.group.WORLD.group_name
        return place_in(name), ranks_of(name)

    assert on_threads(3, work) == [((rank, 3), 3) for rank in range(3)]


def test_a_name_that_nobody_gave_has_no_ranks():
    assert ranks_of("nobody called a group this") is None

"""What each collective gives on several ranks, which are threads here; exact, for all data are whole."""

import pytest
import torch
import torch.distributed as dist
from k3compile.runtime.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from threaded_ranks import on_threads


def name_of_world() -> str:
    return dist.group.WORLD.group_name


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_collective_gives_what_its_docstring_says(ranks):
    def work(rank: int) -> None:
        own = torch.arange(6.0).view(2, 3) + 10 * rank
        every = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(ranks)]
        assert torch.equal(all_reduce(own, name_of_world()), torch.stack(every).sum(0))
        assert torch.equal(all_gather(own, ranks, name_of_world()), torch.cat(every))
        wide = torch.arange(2.0 * ranks)[:, None] + rank
        total = ranks * torch.arange(2.0 * ranks)[:, None] + sum(range(ranks))
        got = reduce_scatter(wide, ranks, name_of_world())
        assert torch.equal(got, total[2 * rank : 2 * rank + 2])
        sent = torch.tensor([[100 * rank + r] for r in range(ranks)])
        got = all_to_all(sent, ranks, name_of_world())
        assert got.flatten().tolist() == [100 * r + rank for r in range(ranks)]

    on_threads(ranks, work)

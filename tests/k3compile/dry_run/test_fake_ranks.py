"""Any rank of any number in one process, and never in the place of a group that is used."""

import subprocess
import sys

import pytest
from k3compile.runtime.parallel.ranks import world

from k3compile.dry_run.fake_ranks import fake_ranks

CODE = """
import torch
import torch.distributed as dist
from k3compile.dry_run.fake_ranks import fake_ranks
from k3compile.runtime.parallel.collectives import all_gather

groups = set()
for rank in (0, 5):
    with fake_ranks(rank, 8, 2) as ranks:
        assert (ranks.rank, ranks.size, ranks.context, ranks.context_rank) == (rank, 8, 2, rank % 2)
        assert all_gather(torch.ones(1, 4), 8, ranks.group).shape == (8, 4)
        groups.add((ranks.group, ranks.context_group))
    assert not dist.is_initialized()
assert len(groups) == 1, groups
try:
    with fake_ranks(0, 2):
        raise KeyError
except KeyError:
    assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_ranks_come_and_go_in_one_process():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_group_that_exists_is_left_alone():
    before = world()
    with pytest.raises(ValueError, match="this process is in one already"), fake_ranks(0, 8):
        pass
    assert world() == before


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(ValueError, match="8 ranks are numbered 0 to 7"), fake_ranks(rank, 8):
        pass

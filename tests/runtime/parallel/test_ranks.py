"""One process sums over a group of one, and joins the group it finds."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from k3compile.runtime.parallel.collectives import all_gather, all_reduce
from k3compile.runtime.parallel.ranks import group, world
from threaded_ranks import on_threads


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, because a process group belongs to a process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_group_of_one_returns_an_equal_new_tensor(dtype, rows):
    x = torch.randn(rows, 6).to(dtype)
    total = all_reduce(x, group())
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr() or rows == 0
    assert world() == (0, 1, group(), 1, "")


def test_both_collective_nodes_stand_in_a_graph():
    seen = []

    def keep(gm, inputs):
        seen.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    name = group()
    torch.compile(lambda x: all_reduce(x * 2, name) + 1, backend=keep, fullgraph=True)(torch.ones(3))
    assert [one.removesuffix(".default") for one in seen if "c10d" in one] == [
        "_c10d_functional.all_reduce",
        "_c10d_functional.wait_tensor",
    ]


def test_the_group_opens_no_port():
    done = run("""
        import psutil
        from k3compile.runtime.parallel.ranks import group
        group()
        listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        print(listening)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_existing_group_is_joined():
    done = run("""
        import torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
        from k3compile.runtime.parallel.ranks import group, world
        assert world() == (3, 8, dist.group.WORLD.group_name, 1, "")
        of_two = world(2)
        assert (of_two.context, of_two.context_rank) == (2, 1) and of_two.context_group != group()
        assert world(8).context_group == group()
        assert world(2) == of_two, "made once"
    """)
    assert done.returncode == 0, done.stderr


def test_the_groups_of_a_context_have_one_name_and_their_own_ranks():
    def work(rank: int) -> tuple:
        ranks = world(2)
        own = all_gather(torch.tensor([rank]), 2, ranks.context_group)
        return ranks.context_group, ranks.context_rank, own.tolist()

    found = on_threads(4, work)
    assert len({name for name, *_ in found}) == 1
    assert [rest for _, *rest in found] == [[0, [0, 1]], [1, [0, 1]], [0, [2, 3]], [1, [2, 3]]]


@pytest.mark.slow
def test_processes_that_have_not_met_are_refused():
    done = run("from k3compile.runtime.parallel.ranks import group; group()", WORLD_SIZE="8")
    assert done.returncode != 0
    assert "WORLD_SIZE is 8 but torch.distributed is not initialised" in done.stderr

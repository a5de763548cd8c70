"""The arithmetic of the tail through symmetric memory, its buffers' sums done by a group of threads.

The kernels of symmetric memory themselves need GPUs; what they are called with is checked here.
"""

import pytest
import torch
import torch.distributed as dist
from k3compile.kernels import symmetric_memory
from k3compile.kernels.latent_tail import latent_tail
from k3compile.kernels.latent_tail_symm import objection
from k3compile.kernels.latent_tail_tiers import FUSED_TOKENS
from latent_tails import EPS, make_args, part, summed
from pretended_group import pretended_group
from threaded_ranks import on_threads
from torch._subclasses.fake_tensor import FakeTensorMode

k3 = torch.ops.k3


@pytest.fixture
def buffers(monkeypatch):
    """What was asked for, as (numel, dtype), and how many sums were made."""
    asked, sums = [], []

    def shared_buffer(group, numel, dtype, device):
        asked.append((numel, dtype))
        return torch.full((numel,), float("nan"), dtype=dtype, device=device)

    def sum_of_buffers(mine, group):
        assert mine.storage_offset() == 0, "a kernel of symmetric memory reads from the buffer's start"
        assert mine.is_contiguous()
        sums.append(tuple(mine.shape))
        total = mine.clone()
        dist.all_reduce(total)
        mine.fill_(float("nan"))  # what the next sum does not write itself is not there
        return total

    monkeypatch.setattr(symmetric_memory, "shared_buffer", shared_buffer)
    monkeypatch.setattr(symmetric_memory, "sum_of_buffers", sum_of_buffers)
    return asked, sums


def run(ranks, whole):
    """The result of every rank, and the exact one of one rank."""
    parts = [part(whole, rank, ranks) for rank in range(ranks)]
    exact = latent_tail.meaning(*summed(parts), EPS, "")
    name = lambda: dist.group.WORLD.group_name  # noqa: E731
    return on_threads(ranks, lambda rank: k3.latent_tail.symm(*parts[rank], EPS, name())), exact


@pytest.mark.parametrize("tokens", [0, 1, 7, FUSED_TOKENS])
@pytest.mark.parametrize("ranks", [2, 8])
def test_few_rows_give_what_one_rank_gives_by_two_sums(ranks, tokens, buffers):
    whole = make_args(torch.float64, tokens, top_k=4, width=32, holes=tokens > 1, poison=True)
    results, exact = run(ranks, whole)
    for got in results:
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
        assert torch.equal(got, results[0]), "the same bits on every rank"
    asked, sums = buffers
    assert set(asked) == {(FUSED_TOKENS * 32, torch.float64)}, "one size for any number of rows"
    assert sorted(sums) == sorted([(tokens, 24), (tokens, 32)] * ranks)


def test_more_rows_go_by_their_tier(buffers):
    whole = make_args(torch.float64, FUSED_TOKENS + 1, top_k=4, width=32)
    results, exact = run(2, whole)
    torch.testing.assert_close(results[1], exact, rtol=1e-12, atol=1e-12)
    assert buffers == ([], [])


def test_in_bfloat16_the_error_is_that_of_the_tiers(buffers):
    whole = make_args(torch.bfloat16, tokens=48, top_k=4, latent=96, width=64)
    results, exact = run(4, whole)
    parts = [part(whole, rank, 4) for rank in range(4)]
    name = lambda: dist.group.WORLD.group_name  # noqa: E731
    tiers = on_threads(4, lambda rank: k3.latent_tail.column(*parts[rank], EPS, name()))
    error, bound = (float((got[0].double() - exact).norm()) for got in (results, tiers))
    assert error <= 1.1 * bound


def test_it_is_of_gpus_and_of_groups_whose_ranks_divide_the_width():
    args = make_args(torch.bfloat16, tokens=3, width=36)
    with pretended_group(8) as group, FakeTensorMode():
        assert objection(*args, EPS, group) == "cpu tensors"
        there = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in args]
        assert objection(*there, EPS, group) == "a width of 36 does not divide by 8 ranks"


def test_it_is_only_chosen_when_asked_for():
    order = list(latent_tail.implementations)
    assert order.index("tiers") < order.index("symm"), "the first without an objection is chosen"

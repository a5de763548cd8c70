"""Which rank holds which token, against going through the tokens one by one."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from k3compile.kernels.context_place import local_index, local_length, owner
from threaded_ranks import on_threads
from torch._subclasses.fake_tensor import FakeTensorMode


def dealt(length: int, ranks: int, interleave: int) -> list[list[int]]:
    """The tokens of each rank: runs of ``interleave`` go round."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    for token in range(length):
        held[token // interleave % ranks].append(token)
    return held


@given(length=st.integers(0, 200), ranks=st.integers(1, 9), interleave=st.integers(1, 7))
def test_lengths_owners_and_places_are_those_of_dealing_the_tokens_out(length, ranks, interleave):
    tokens = torch.arange(length)
    for rank, held in enumerate(dealt(length, ranks, interleave)):
        place = torch.tensor([rank, ranks, interleave])
        assert local_length(torch.tensor([length]), place).item() == len(held)
        own = owner(tokens, place) == rank
        assert tokens[own].tolist() == held
        assert local_index(tokens[own], place).tolist() == list(range(len(held)))


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 16))
def test_the_ranks_have_all_tokens_of_a_text_between_them(length, ranks, interleave):
    shares = [
        local_length(torch.tensor(length), torch.tensor([r, ranks, interleave])).item() for r in range(ranks)
    ]
    assert sum(shares) == length
    assert max(shares) - min(shares) <= interleave


@pytest.mark.parametrize("length", [0, 1, 3, 4, 15, 16, 17, 37])
def test_lengths_are_those_of_the_written_formula(length):
    ranks, interleave = 4, 2
    for rank in range(ranks):
        turn = ranks * interleave
        want = length // turn * interleave + min(max(length % turn - rank * interleave, 0), interleave)
        assert local_length(torch.tensor(length), torch.tensor([rank, ranks, interleave])).item() == want


@given(st.integers(0, 500), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_a_page_of_all_ranks_is_a_page_of_each(token, ranks, interleave, turns):
    size = turns * ranks * interleave  # tokens of a page, which ranks and interleave divide
    place = torch.tensor([0, ranks, interleave])
    index = local_index(torch.tensor(token), place).item()
    assert index // (size // ranks) == token // size
    offset = token % size
    assert index % (size // ranks) == offset // (ranks * interleave) * interleave + offset % interleave


def test_every_rank_of_a_group_learns_its_own_place():
    def work(rank: int) -> list[int]:
        return torch.ops.k3.context_place(dist.group.WORLD.group_name, 3).tolist()

    assert on_threads(4, work) == [[rank, 4, 3] for rank in range(4)]


def test_without_data_it_is_a_tensor_of_three_integers_on_the_cpu():
    with FakeTensorMode():
        place = torch.ops.k3.context_place("whatever", 1)
    assert (place.shape, place.dtype, place.device.type) == ((3,), torch.int64, "cpu")

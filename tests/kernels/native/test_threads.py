"""A pass over few rows has one thread for what others made, and our kernels as many as torch was told."""

import threading

import pytest
import torch
from k3compile.kernels.native import alone, threads
from k3compile.kernels.native.threads import Alone

pytestmark = pytest.mark.skipif(alone._set is None, reason="torch's OpenMP runtime is not to be found")


@pytest.fixture
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_has_one_thread_inside_and_kernels_keep_theirs(three):
    assert (threads(), torch.get_num_threads()) == (3, 3)
    with alone:
        assert (threads(), torch.get_num_threads()) == (3, 1)
        with alone:
            assert (threads(), torch.get_num_threads()) == (3, 1)
        assert (threads(), torch.get_num_threads()) == (3, 1)
    assert (threads(), torch.get_num_threads()) == (3, 3)


def test_an_error_inside_gives_the_threads_back(three):
    with pytest.raises(KeyError), alone:
        raise KeyError
    assert (threads(), torch.get_num_threads()) == (3, 3)


def test_other_threads_are_not_concerned(three):
    found = []

    def look():
        found.append((threads(), torch.get_num_threads()))

    with alone:
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert found[0][0] == found[0][1] > 1


def test_without_openmp_nothing_changes(three):
    lone = Alone()
    lone._set = None
    with lone:
        assert (threads(), torch.get_num_threads()) == (3, 3)

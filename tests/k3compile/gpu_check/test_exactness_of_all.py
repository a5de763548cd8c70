"""The error rule and the poison for every implementation in the registry: native and interpreted Triton."""

import pytest
import torch
from every_kernel import every_implementation

ALL = every_implementation()
ELSEWHERE = {  # what cannot be run here, by what it says
    "nothing is summed over ranks",  # tests/kernels/test_latent_tail_tiers.py has ranks
    "cpu tensors",  # sums that GPUs make in each other's memory
    "a GPU without block-scaled matrix instructions",  # its own test interprets it
}


def ids(one):
    return "-".join(one) if isinstance(one, tuple) else str(one).removeprefix("torch.")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("one", ALL, ids=ids)
def test_it_is_no_further_from_float64_than_its_meaning(one, dtype):
    if one.provider.startswith("triton"):
        pytest.importorskip("triton")
    found = one.exact(dtype)
    assert found.complaints == []
    assert found.calls or dtype == torch.bfloat16 or set(found.refused) <= ELSEWHERE, found.refused


@pytest.mark.slow
@pytest.mark.parametrize("one", ALL, ids=ids)
def test_what_is_not_its_calls_is_neither_read_nor_written(one):
    if one.provider.startswith("triton"):
        pytest.importorskip("triton")
    for found in one.poisoned(torch.float32, calls=3):
        assert found.wrong == []
        assert found.calls or set(found.refused) <= ELSEWHERE, found.refused

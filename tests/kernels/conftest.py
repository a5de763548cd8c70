"""Random inputs of a test are the same whatever ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

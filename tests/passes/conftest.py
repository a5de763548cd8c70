"""Ops that misbehave in instructive ways."""

import pytest
import reversing_op  # noqa: F401  (declares the op)
import torch


@pytest.fixture
def rev_into():
    """Copies rows into its second argument, last row first: with shared memory it reads its own writes."""
    return torch.ops.k3test.rev_into

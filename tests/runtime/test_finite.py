"""A model that holds NaN or infinity is refused when an engine is made, wherever it came from."""

import pytest
import torch
from draft_reference import small_draft
from draft_serving import FIVE, tapped
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.finite import SHOWN, check_finite
from k3compile.runtime.make_engine import make_engine, make_follower
from torch import nn


def model(dtype=torch.float32, parts=2):
    """Matrices, vectors, bytes and an empty parameter."""
    made = nn.ModuleList([nn.Linear(3, 2, dtype=dtype) for _ in range(parts)])
    made.packed = nn.Parameter(torch.full((4,), 255, dtype=torch.uint8), requires_grad=False)
    made.none = nn.Parameter(torch.empty(0, 3))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_none_is_found_by_name(dtype, value):
    made = model(dtype)
    check_finite(made, None)
    with torch.no_grad():
        made[1].bias[1] = value
        made[0].weight[1, 2] = value
    with pytest.raises(ValueError, match=r"^0\.weight, 1\.bias of the model hold NaN or infinity, as no"):
        check_finite(made)


def test_large_numbers_are_numbers():
    made = model(torch.float64)
    with torch.no_grad():
        made[0].bias[0] = 1e300
    check_finite(made)


def test_a_model_that_nobody_filled_is_told_in_a_line():
    made = model(parts=10)
    with torch.no_grad():
        for p in made.parameters():
            if p.is_floating_point():
                p.fill_(torch.nan)
    with pytest.raises(ValueError, match=rf"^0\.weight, .* and {20 - SHOWN} more of the model hold NaN"):
        check_finite(made)


@pytest.mark.parametrize("make", [make_engine, make_follower])
@pytest.mark.parametrize("broken", ["model", "draft"])
def test_an_engine_is_not_made_of_it(make, broken):
    """A router's bias of infinity changes who is chosen and no logit is NaN: nothing else would tell."""
    served, draft = tapped(), small_draft(FIVE)
    owner = served if broken == "model" else draft
    name, parameter = next((n, p) for n, p in owner.named_parameters() if p.dim() == 1)
    with torch.no_grad():
        parameter[0] = torch.inf
    with pytest.raises(ValueError, match=f"{name} of the model hold NaN or infinity"):
        make(served, EngineConfig(num_drafts=3), draft=draft)

"""The router in Triton, interpreted: the written tie rule, rows that do not notice each other, NaN."""

import pytest
import torch
from interpreted import check_op, check_samples, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.moe_route_triton import objection

route = OPS["route"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples("route", dtype)


def router(tokens=5, width=40, experts=12):
    return torch.randn(tokens, width), torch.randn(experts, width), torch.randn(experts) * 0.1


def test_equal_choices_go_to_the_lower_expert():
    x, gate, bias = router()
    gate[[2, 5, 9]], bias[[2, 5, 9]] = gate[7].clone(), 3.0
    bias[7] = 3.0
    (_, ids), _ = check_op("route", torch.float32, (x, gate, bias, 3, 1.0, True))
    assert ids.tolist() == [[2, 5, 7]] * 5


def test_zeros_of_both_signs_tie():
    x, gate = torch.zeros(2, 16), torch.zeros(6, 16)
    bias = torch.tensor([-0.5, -0.5, 0.25, -0.5, 0.25, -9.0])  # 0.5 - 0.5 is 0.0
    (_, ids), _ = check_op("route", torch.float32, (x, gate, bias, 5, 1.0, False))
    assert ids.tolist() == [[2, 4, 0, 1, 3]] * 2


def test_negative_and_infinite_choices_are_in_order():
    x, gate = torch.zeros(1, 16), torch.zeros(5, 16)
    bias = torch.tensor([-torch.inf, -3.0, -1.0, torch.inf, -torch.inf])
    (_, ids), _ = outcome_of("route", (x, gate, bias, 5, 1.0, False))
    assert ids.tolist() == [[3, 2, 1, 0, 4]]


def test_a_row_of_nan_gets_the_first_experts_and_no_other_row_notices():
    x, gate, bias = router()
    (weights, ids), _ = outcome_of("route", (x, gate, bias, 4, 1.0, True))
    x[2] = torch.nan
    (poisoned, chosen), _ = outcome_of("route", (x, gate, bias, 4, 1.0, True))
    assert chosen[2].tolist() == [0, 1, 2, 3]
    assert poisoned[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(chosen[others], ids[others])
    assert torch.equal(poisoned[others], weights[others])


def test_a_row_chooses_alike_in_any_batch():
    x, gate, bias = router(tokens=70)
    (weights, ids), _ = outcome_of("route", (x, gate, bias, 4, 1.0, True))
    for token in (0, 63, 64, 69):
        (alone, own), _ = outcome_of("route", (x[token : token + 1], gate, bias, 4, 1.0, True))
        assert torch.equal(own[0], ids[token])
        assert torch.equal(alone[0], weights[token])


def test_nothing_past_a_row_or_an_expert_is_read():
    x, gate = torch.full((5, 120), torch.nan), torch.full((14, 80), torch.nan)
    x[:, 40:80], gate[:12, :40] = torch.randn(5, 40), torch.randn(12, 40)
    check_op("route", torch.float32, (x[:, 40:80], gate[:12, :40], torch.randn(12), 4, 2.5, True))


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import moe_route_triton

    x, gate, bias = router()
    assert objection(x, gate, bias, 4, 1.0, True) == "cpu tensors"
    monkeypatch.setattr(moe_route_triton, "no_gpu", lambda *tensors: None)
    assert objection(x, gate, bias, 4, 1.0, True) is None
    assert "float64" in objection(x, gate, bias.double(), 4, 1.0, True)
    assert "rows of torch.bfloat16" in objection(x.bfloat16(), gate, bias, 4, 1.0, True)
    assert "5000 experts" in objection(x, torch.zeros(5000, 40), torch.zeros(5000), 4, 1.0, True)

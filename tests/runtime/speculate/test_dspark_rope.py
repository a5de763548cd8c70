"""The draft's positions: the constants that are printed for the released draft, and what a rotation is."""

import math

import pytest
import torch
from k3compile.runtime.speculate.dspark_rope import Yarn, rotate

RELEASED = Yarn(50000.0, 32.0, 32768, 32.0, 1.0, 1.0, 1.0)


def test_the_constants_of_the_released_draft():
    assert RELEASED.correction_dim(32, 64) == pytest.approx(15.06, abs=0.005)
    assert RELEASED.correction_dim(1, 64) == pytest.approx(25.31, abs=0.005)
    assert RELEASED.ramp(64) == (15, 26)
    assert RELEASED.magnitude == 1.0
    assert RELEASED.gain(1.0) ** 2 == pytest.approx(1.8132604, abs=5e-8)
    assert RELEASED.softmax_scale(192) == pytest.approx(0.1308608, abs=5e-8)


def test_frequencies_are_kept_blended_and_divided():
    found = RELEASED.frequencies(64)
    base = torch.tensor([50000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert found.shape == (32,)
    assert torch.allclose(found[:16], base[:16], rtol=1e-14, atol=0)
    assert torch.allclose(found[26:], base[26:] / 32, rtol=1e-14, atol=0)
    share = 5 / 11  # frequency 20 of the ramp 15 .. 26
    assert float(found[20]) == pytest.approx(float(base[20]) * (1 - share + share / 32), rel=1e-12)


def test_a_small_width_has_a_ramp_too():
    assert RELEASED.ramp(8) == (1, 4)
    assert RELEASED.ramp(2) == (0, 1)
    assert torch.isfinite(RELEASED.frequencies(2)).all()


def test_another_magnitude_where_the_two_scales_differ():
    other = Yarn(50000.0, 32.0, 32768, 32.0, 1.0, 2.0, 1.0)
    assert other.magnitude == pytest.approx((0.2 * math.log(32) + 1) / (0.1 * math.log(32) + 1))
    turn = other.turn(torch.tensor([0]), other.frequencies(8), torch.float64)
    assert torch.allclose(turn.cos, torch.full((1, 4), other.magnitude, dtype=torch.float64))
    plain = Yarn(50000.0, 1.0, 32768, 32.0, 1.0, 1.0, 1.0)
    assert plain.softmax_scale(64) == 0.125


def test_adjacent_values_are_a_pair_that_turns():
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    x[..., 2] = 1.0
    y = rotate(x, RELEASED.turn(torch.tensor([3]), RELEASED.frequencies(8), torch.float64))
    angle = 3 * float(RELEASED.frequencies(8)[1])
    want = torch.zeros(8, dtype=torch.float64)
    want[2], want[3] = math.cos(angle), math.sin(angle)
    assert torch.allclose(y[0, 1], want, rtol=0, atol=1e-15)


def test_a_score_hangs_on_the_distance_alone_even_far_out():
    q, k = torch.randn(2, 1, 64, dtype=torch.float64)
    scores = []
    for start in (0, 1000, 1_000_000):
        turned = [
            rotate(x, RELEASED.turn(torch.tensor([p]), RELEASED.frequencies(64), torch.float64))
            for x, p in ((q, start + 17), (k, start))
        ]
        scores.append(float((turned[0] * turned[1]).sum()))
    assert scores[1] == pytest.approx(scores[0], abs=1e-9)
    assert scores[2] == pytest.approx(scores[0], abs=1e-7)


def test_bfloat16_rows_are_turned_in_float32():
    x = torch.randn(3, 4, 8).bfloat16()
    turn = RELEASED.turn(torch.tensor([0, 5, 900_000]), RELEASED.frequencies(8), torch.bfloat16)
    assert turn.cos.dtype == torch.float32
    exact = rotate(
        x.double(), RELEASED.turn(torch.tensor([0, 5, 900_000]), RELEASED.frequencies(8), torch.float64)
    )
    y = rotate(x, turn)
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() < 0.02

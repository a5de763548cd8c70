"""What a latent tail sends and reads is known from sizes alone, symbols too."""

import pytest
import torch
import torch.distributed as dist
from k3compile.kernels.latent_tail_traffic import COLLECTIVES, Traffic
from latent_tails import EPS, make_args
from threaded_ranks import on_threads
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

T, L, D = 5, 24, 16
LATENT, SHARED, WEIGHT = T * L * 2, T * D * 2, D * L * 2


def declared(form, ranks=4):
    args = make_args(torch.bfloat16, T, latent=L, width=D)
    count = COLLECTIVES[f"latent_tail.{form}"]
    return on_threads(ranks, lambda rank: count(*args, EPS, dist.group.WORLD.group_name))[0]


def test_without_a_group_nothing_travels():
    args = make_args(torch.bfloat16, T, latent=L, width=D)
    assert COLLECTIVES["latent_tail.cpu"](*args, EPS, "") == (Traffic(None, 0, 0, WEIGHT),)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("default", Traffic(None, 2, LATENT + SHARED, WEIGHT)),
        ("overlap", Traffic(None, 2, LATENT + SHARED, WEIGHT)),
        ("column", Traffic(None, 2, LATENT + SHARED, WEIGHT // 4)),
        ("fused", Traffic(None, 3, LATENT + SHARED + SHARED // 4, WEIGHT // 4)),
    ],
)
def test_a_form_declares_its_own(form, expected):
    assert declared(form) == (expected,)


def test_the_tiers_declare_each():
    few, some, many = declared("tiers")
    assert [t.up_to for t in (few, some, many)] == [128, 256, None]
    assert few[1:] == declared("fused")[0][1:]
    assert some[1:] == declared("overlap")[0][1:]
    assert many == declared("column")[0]


def test_a_number_of_rows_that_only_the_data_knows_stays_a_symbol():
    rows, w, idx, norm_w, up_w, shared = make_args(torch.bfloat16, T, latent=L, width=D)
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:
        tokens = mode.shape_env.create_unbacked_symint()
        fake = [mode.from_tensor(t) for t in (rows, norm_w, up_w)]
        empty = [torch.empty(tokens, n, dtype=t.dtype) for t, n in ((w, 2), (idx, 2), (shared, D))]
        few, *_ = COLLECTIVES["latent_tail.tiers"](fake[0], *empty[:2], *fake[1:], empty[2], EPS, "0")
    assert few.collectives == 3
    assert (few.sent.node.expr - 2 * tokens.node.expr * (L + 2 * D)).simplify() == 0  # no group "0": one rank

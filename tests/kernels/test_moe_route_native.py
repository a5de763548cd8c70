"""The router in C++: the meaning's experts and weights, the written tie rule, no row noticing another."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import moe_route_native
from k3compile.kernels.moe import route
from k3compile.kernels.native import ISAS, build
from k3compile.passes.lower import Lower
from lanes import thinned

RANK = list(ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("route", request.param):
        pytest.skip(reason)
    return request.param


def router(tokens=5, width=40, experts=12):
    return torch.randn(tokens, width), torch.randn(experts, width), torch.randn(experts) * 0.1


def check(isa, *args):
    """Ids are the meaning's, weights as close to float64 as the meaning's are; both are returned."""
    weights, ids = moe_route_native.run(*args, isa=isa)
    meant, chosen = route.meaning(*args)
    assert torch.equal(ids, chosen)
    exact, _ = route.meaning(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    of_meaning = (meant.double() - exact).abs().max() if len(meant) else 0.0
    assert (weights.double() - exact).abs().sum() <= 1.1 * max(of_meaning, 2.0**-24) * max(1, exact.numel())
    torch.testing.assert_close(weights, meant, rtol=1e-6, atol=0.0, equal_nan=True)
    return weights, ids


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 7, 70])
@pytest.mark.parametrize(("width", "experts", "top_k"), [(40, 12, 3), (1024, 32, 4), (67, 70, 16), (5, 3, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_it_chooses_and_weighs_as_the_meaning(isa, tokens, width, experts, top_k, renormalize):
    check(isa, *router(tokens, width, experts), top_k, 2.446, renormalize)


def test_equal_choices_go_to_the_lower_expert(isa):
    x, gate, bias = router()
    gate[[2, 5, 9]], bias[[2, 5, 9]] = gate[7].clone(), 3.0
    bias[7] = 3.0
    _, ids = check(isa, x, gate, bias, 3, 1.0, True)
    assert ids.tolist() == [[2, 5, 7]] * 5


def test_zeros_of_both_signs_tie_and_infinities_are_in_order(isa):
    bias = torch.tensor([-0.5, -0.5, 0.25, -0.5, 0.25, -9.0])  # 0.5 - 0.5 is 0.0
    _, ids = check(isa, torch.zeros(2, 16), torch.zeros(6, 16), bias, 5, 1.0, False)
    assert ids.tolist() == [[2, 4, 0, 1, 3]] * 2
    bias = torch.tensor([-torch.inf, -3.0, -1.0, torch.inf, -torch.inf])
    _, ids = check(isa, torch.zeros(1, 16), torch.zeros(5, 16), bias, 5, 1.0, False)
    assert ids.tolist() == [[3, 2, 1, 0, 4]]


def test_a_row_of_nan_gets_the_first_experts_and_no_other_row_notices(isa):
    x, gate, bias = router()
    weights, ids = moe_route_native.run(x, gate, bias, 4, 1.0, True, isa)
    x[2] = torch.nan
    poisoned, chosen = moe_route_native.run(x, gate, bias, 4, 1.0, True, isa)
    assert chosen[2].tolist() == [0, 1, 2, 3]
    assert poisoned[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(chosen[others], ids[others])
    assert torch.equal(poisoned[others], weights[others])


def test_a_nan_in_the_bias_is_the_largest_choice(isa):
    x, gate, bias = router()
    bias[[4, 8]] = torch.nan
    _, ids = moe_route_native.run(x, gate, bias, 4, 1.0, True, isa)
    assert torch.equal(ids, route.meaning(x, gate, bias, 4, 1.0, True)[1])
    assert (ids[:, :2] == torch.tensor([4, 8])).all()


def test_a_row_depends_neither_on_its_batch_nor_on_threads(isa):
    x, gate, bias = router(70, 600, 96)
    weights, ids = moe_route_native.run(x, gate, bias, 4, 1.0, True, isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = moe_route_native.run(x, gate, bias, 4, 1.0, True, isa)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again[0], weights)
    assert torch.equal(again[1], ids)
    for token in (0, 63, 64, 69):
        alone, own = moe_route_native.run(x[token : token + 1], gate, bias, 4, 1.0, True, isa)
        assert torch.equal(own[0], ids[token])
        assert torch.equal(alone[0], weights[token])


def test_nothing_beside_the_arguments_is_read_and_nothing_beside_the_results_written(isa, monkeypatch):
    x, gate = torch.full((5, 120), torch.nan), torch.full((14, 80), torch.nan)
    x[:, 40:80], gate[:12, :40] = torch.randn(5, 40), torch.randn(12, 40)
    args = x[:, 40:80], gate[:12, :40], torch.randn(12), 4, 2.5, True
    want, made = (
        moe_route_native.run(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), isa),
        [],
    )

    def guarded(shape, dtype):
        room = torch.full((torch.Size(shape).numel() + 128,), 77, dtype=dtype)
        made.append(room)
        return room[64:-64].view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda t, *s: guarded(s, t.dtype))
        patch.setattr(torch, "empty", lambda *s, dtype: guarded(s, dtype))
        got = moe_route_native.run(*args, isa)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert len(made) == 3
    for room in made:
        assert (room[:64] == 77).all()
        assert (room[-64:] == 77).all()


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    x, gate, bias = router()
    rest = 3, 1.0, True
    assert moe_route_native.objection(x.to("meta"), gate, bias, *rest) == "meta tensors"
    assert "bfloat16, not float32" in moe_route_native.objection(x, gate.bfloat16(), bias, *rest)
    assert "side by side" in moe_route_native.objection(x, gate.t(), bias, *rest)
    with monkeypatch.context() as patch:
        patch.setattr(moe_route_native, "best_isa", lambda: "portable")
        assert "four lanes" in moe_route_native.objection(x, gate, bias, *rest)
    monkeypatch.setattr(moe_route_native, "best_isa", lambda: "avx2")
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in moe_route_native.objection(x, gate, bias, *rest)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler.* the reference computes it"):
        got = route.implementations["native"].fn(x, gate, bias, *rest)
    assert torch.equal(got[1], route.meaning(x, gate, bias, *rest)[1])


def test_it_is_chosen_and_a_report_says_so():
    args = *router(), 3, 1.0, True
    if reason := moe_route_native.objection(*args):
        pytest.skip(reason)
    compiled = Compiled(lambda x, g, b: route.overload(x, g, b, 3, 1.0, True), (Lower(fuses=True),))
    assert torch.equal(compiled(*args[:3])[1], route.meaning(*args)[1])
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"

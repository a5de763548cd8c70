"""The prover knows what a ShapeEnv was told, says where it knows it from, and teaches only what it proved."""

import pytest
import torch
from k3compile.passes.prover import Prover, expr
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true


@pytest.fixture
def spans():
    """A prover and sizes nv, nd, t with nv + nd == t, all at least 0, told by torch._check."""
    env = ShapeEnv()
    nv, nd, t = (env.create_unbacked_symint() for _ in range(3))
    torch._check(nv >= 0)
    torch._check(nd >= 0)
    torch._check(nv + nd == t)
    return Prover(env), nv, nd, t


def test_a_span_is_inside_the_rows_which_the_shape_env_alone_does_not_see(spans):
    prover, nv, nd, t = spans
    assert not statically_known_true(nv <= t)
    assert prover.le(nv, t)
    assert prover.le(nd, t)
    assert not prover.le(t, nv)
    assert not prover.le(nv + 1, t)


def test_equal_sizes_need_not_look_equal(spans):
    prover, nv, nd, t = spans
    assert prover.equal(t - nv, nd)
    assert not prover.equal(nv, nd)
    assert prover.equal(3, 3)
    assert not prover.equal(3, 4)


def test_a_proof_says_what_it_rests_on(spans):
    prover, nv, _, t = spans
    proof = prover.prove_le("end <= size", nv, t)
    assert (proof.how, proof.expression) == ("torch._check", f"{expr(nv)} <= {expr(t)}")
    assert prover.prove_le("0 <= start", 0, 0).how == "construction"
    assert prover.prove_le("end <= size", t, nv) is None


def test_a_bound_without_an_assertion_is_static():
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    torch.fx.experimental.symbolic_shapes.constrain_range(size, min=2, max=9)
    assert Prover(env).prove_le("", 2, size).how == "static"
    assert Prover(env).prove_le("", size, 9).how == "static"
    assert Prover(env).prove_le("", 3, size) is None


def test_a_new_fact_is_seen(spans):
    prover, nv, nd, _ = spans
    assert not prover.le(nv, nd)
    torch._check(nv <= nd)
    assert prover.le(nv, nd)


def test_teaching_makes_the_shape_env_see_it_and_adds_no_guard(spans):
    prover, nv, _, t = spans
    prover.teach(nv, t)
    assert statically_known_true(nv <= t)
    assert prover.shape_env.guards == []
    with pytest.raises(AssertionError):
        prover.teach(t, nv)


def test_a_proof_can_be_read_back(spans):
    prover, nv, _, t = spans
    assert prover.holds(prover.prove_le("", nv, t).expression)
    assert not prover.holds(f"{expr(t)} <= {expr(nv)}")
    assert prover.holds("0 <= 3")


def test_multiples_are_seen_term_by_term(spans):
    prover, nv, nd, _ = spans
    assert prover.multiple(32 * nv + 16 * nd, 16)
    assert not prover.multiple(32 * nv + 8, 16)
    assert not prover.multiple(nv, 16)
    assert prover.multiple(48, 16)


def test_without_a_shape_env_integers_are_compared():
    assert Prover(None).le(1, 2)
    assert not Prover(None).le(2, 1)


def test_a_size_that_is_known_to_be_positive_by_its_kind_is():
    seen = []

    def backend(gm, inputs):
        sizes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        (size,) = (s for s in sizes if isinstance(s, torch.SymInt))
        prover = Prover(size.node.shape_env)
        seen.append((prover.le(0, size), prover.le(2, size), prover.le(3, size), prover.le(size * 16, size)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.rand(5))
    assert seen == [(True, True, False, False)]

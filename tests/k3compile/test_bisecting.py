"""torch's CompilerBisector finds the guilty one of our passes by name, rewrite by rewrite."""

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.graph import emit
from k3compile.passes.remarks import PassResult
from torch._inductor import compiler_bisector

from k3compile import backend

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("own_reports")


class Replaces:
    """A pass that replaces each call of one op by a call of another, one rewrite each."""

    level, keeps = "aten", "exact"

    def __init__(self, name, old, new):
        self.name, self.old, self.new = name, old, new

    def run(self, gm, ctx):
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=self.old):
            if ctx.may_rewrite(self.name):
                changed = True
                with gm.graph.inserting_before(node):
                    new = emit(gm.graph, self.new, node.args[:1], like=node, mode=ctx.fake_mode)
                node.replace_all_uses_with(new)
        return PassResult(changed)


GUILTY = Replaces("contiguous_views", aten.sin.default, aten.cos.default)
PASSES = (
    Replaces("canonicalize", aten.neg.default, aten.neg.default),
    GUILTY,
    Replaces("latent_tail", aten.exp.default, aten.exp.default),
)


def program(x):
    return -torch.sin(x) * 2 + x.exp()


def right():
    torch._dynamo.reset()
    x = torch.linspace(0.1, 1, 8)
    with torch.no_grad():
        result = torch.compile(program, backend="k3", options={"inner": "aot_eager"})(x)
    return torch.allclose(result, program(x))


@pytest.fixture
def guilty_pass(monkeypatch):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", PASSES)


@pytest.fixture
def our_bisector():
    """Our part of the bisector's systems before Inductor's, and all of it as it was afterwards.

    Inductor's stays known, last: the bisector looks at it when it cleans up.
    """
    known = dict(compiler_bisector.BACKENDS)
    compiler_bisector.BACKENDS.clear()
    compiler_bisector.BACKENDS.update({name: known[name] for name in ("eager", "inductor")})
    yield compiler_bisector.CompilerBisector
    compiler_bisector.BACKENDS.clear()
    compiler_bisector.BACKENDS.update(known)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_the_bisector_names_the_guilty_pass(guilty_pass, our_bisector, capsys):
    inductor = compiler_bisector.BACKENDS.pop("inductor")
    assert not right(), "the pass does damage, and its compile registers us with the bisector"
    compiler_bisector.BACKENDS["inductor"] = inductor
    found = our_bisector.do_bisect(right)
    assert (found.backend, found.subsystem, found.debug_info) == ("k3", "k3_passes", "contiguous_views")
    assert our_bisector.bisection_enabled is False
    assert our_bisector.in_process_cache is None


def test_the_bisectors_systems_are_as_before_the_test_above():
    assert "inductor" in compiler_bisector.BACKENDS


@pytest.mark.parametrize(("fuel", "is_right"), [("1", True), ("2", False)])
def test_fuel_stops_between_two_rewrites(guilty_pass, monkeypatch, fuel, is_right):
    monkeypatch.setenv("K3_FUEL", fuel)
    monkeypatch.setattr(backend, "_fuel", {})
    assert right() is is_right

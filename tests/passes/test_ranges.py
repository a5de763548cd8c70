"""The run an index holds is the run its construction says, and agrees with the numbers it really holds."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.graph import fake_mode_of
from k3compile.passes.index_sites import site_nodes, site_of
from k3compile.passes.prover import Prover, expr
from k3compile.passes.ranges import Range, range_of
from lanes import thinned


def answer(build, n0=2, n1=5, decompose=False):
    """What is said about ``build(n0, n1)`` where 0 <= n0 <= n1."""

    def f(x, spans):
        a, b = spans[0].item(), spans[1].item()
        torch._check(a >= 0)
        torch._check(a <= b)
        return x.index_select(0, build(a, b))

    compiled = Compiled(f, (), decompose=decompose, unbacked="L['x']:0")
    compiled(torch.rand(20, 2), torch.tensor([n0, n1]))
    graph = compiled.graphs[0].graph
    (node,) = site_nodes(graph)
    env = fake_mode_of(graph).shape_env
    return range_of(site_of(node).index, Prover(env)), env


def at(size, env, n0=2, n1=5):
    """The value of a symbolic size when a is n0 and b is n1: the two symbols in the order they were made."""
    symbols = sorted(expr(size).free_symbols, key=lambda s: int(str(s)[1:]))
    known = sorted(
        (s for s in env.deferred_runtime_asserts if str(s).startswith("u")), key=lambda s: int(str(s)[1:])
    )
    values = dict(zip(known, (n0, n1)))
    return int(expr(size).subs({s: values[s] for s in symbols}))


RUNS = {
    "from zero": (lambda a, b: torch.arange(b), 0, 5),
    "between": (lambda a, b: torch.arange(a, b), 2, 5),
    "with a step of one": (lambda a, b: torch.arange(a, b, 1), 2, 5),
    "shifted": (lambda a, b: torch.arange(a) + b, 5, 7),
    "shifted twice": (lambda a, b: torch.arange(a) + b - 1 + a, 6, 8),
    "sliced": (lambda a, b: torch.arange(a, b + 9)[1:4], 3, 6),
    "third piece": (lambda a, b: torch.arange(1, a + b + 4).split([a, b, 3])[2], 8, 11),
    "equal pieces": (lambda a, b: torch.arange(9).split(3)[1], 3, 6),
    "copied and moved": (lambda a, b: torch.arange(a, b).clone().to("cpu").contiguous().detach(), 2, 5),
    "joined": (lambda a, b: torch.cat([torch.arange(a), torch.arange(a, b), torch.arange(b, b + 2)]), 0, 7),
    "narrow enough": (lambda a, b: torch.arange(4, 9, dtype=torch.int32), 4, 9),
}


@pytest.mark.parametrize(("build", "start", "end"), RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("decompose", thinned([False, True], 1))
def test_the_run_is_what_the_numbers_are(build, start, end, decompose):
    assert build(2, 5).tolist() == list(range(start, end)), "the case itself"
    found, env = answer(build, decompose=decompose)
    assert isinstance(found, Range), found
    assert (at(found.start, env), at(found.end, env)) == (start, end)


REFUSED = {
    "a step": (lambda a, b: torch.arange(0, 6, 2), "step is 2"),
    "floats": (lambda a, b: torch.arange(0.5, 3.5).long(), "arange of floating point numbers"),
    "half precision": (
        lambda a, b: torch.arange(3, dtype=torch.float16).long(),
        "passes through torch.float16",
    ),
    "bytes": (lambda a, b: torch.arange(3).to(torch.uint8).long(), "passes through torch.uint8"),
    "scaled sum": (lambda a, b: torch.add(torch.arange(3), a, alpha=2), "index comes from aten.add"),
    "sum of two": (lambda a, b: torch.arange(3) + torch.arange(3), "index comes from aten.add"),
    "folded": (lambda a, b: (torch.arange(3) - 1).abs(), "index comes from aten.abs"),
    "tail": (lambda a, b: torch.arange(9)[-2:], "index comes from a slice whose start may be clamped"),
    "strided slice": (lambda a, b: torch.arange(9)[::2], "step is 2"),
    "square": (lambda a, b: torch.arange(4).view(2, 2).t().reshape(-1), "index comes from aten.t"),
    "transposed runs": (
        lambda a, b: torch.cat([torch.arange(3, 5), torch.arange(0, 3)]),
        "the class changes more than once: its rows are [3, 5) and [0, 3)",
    ),
    "nonzero": (lambda a, b: torch.ones(3).nonzero().squeeze(1), "index comes from aten.nonzero"),
    "wide": (
        lambda a, b: torch.arange(b, dtype=torch.int32),
        "passes through torch.int32, which may be too narrow",
    ),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_says_where_it_comes_from(build, reason):
    found, _ = answer(build)
    assert found == reason

"""Under Inductor: what it computes rightly it still does with our passes, and the mixed batch gets cheaper.

Inductor by itself computes some programs of this kind wrongly, so it is never the reference: eager is.
"""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
from alias_programs import arguments, program, source
from compiled import copies
from k3compile.passes.pipeline import ATEN_PASSES
from k3compile.passes.runner import Context, run_passes
from mixed_batch import MIXES, UNBACKED, inputs, layer
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

pytestmark = [pytest.mark.inductor, pytest.mark.slow]


class Hook(CustomGraphPass):
    """Our passes where the backend puts them."""

    def __init__(self, passes):
        self.passes, self.remarks = passes, []

    def __call__(self, graph):
        records = run_passes(graph.owning_module, self.passes, Context("aten", verify="static"))
        self.remarks += [r for record in records for r in record.remarks]

    def uuid(self):
        return None


def compile_with(passes, fn, args, **options):
    """``fn`` under Inductor, after one call with ``args``: the function, the generated code, the remarks."""
    torch._dynamo.reset()
    hook = Hook(passes)
    patches = {"fx_graph_cache": False, "post_grad_custom_pre_pass": hook}
    with torch.no_grad(), inductor_config.patch(patches):
        compiled = torch.compile(fn, fullgraph=True, **options)
        _, code = run_and_get_code(compiled, *copies(args))
    return compiled, code[0], hook.remarks


def agrees(compiled, fn, args):
    """Whether results and arguments are what eager makes of them, up to rounding."""
    ours, theirs = copies(args), copies(args)
    with torch.no_grad():
        got, want = compiled(*ours), fn(*theirs)
    pairs = zip([*as_list(got), *ours], [*as_list(want), *theirs])
    return all(
        not isinstance(b, torch.Tensor) or torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in pairs
    )


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def test_the_mixed_batch_loses_its_copies():
    counts = {}
    for name, passes in (("plain", ()), ("ours", ATEN_PASSES)):
        with torch.compiler.config.patch(unbacked_sources=UNBACKED):
            compiled, code, remarks = compile_with(passes, layer, inputs(*MIXES[0]))
        assert all(agrees(compiled, layer, inputs(*mix)) for mix in MIXES)
        body = code[code.index("def call(self") : code.index("runner = Runner")]
        counts[name] = len(re.findall("empty_strided", body)), len(re.findall(r"cpp_fused\w*\(", body))
    assert [r.kind for r in remarks if r.pass_name == "contiguous_views"] == ["applied"] * 8
    assert counts["ours"][0] <= counts["plain"][0] - 6, "six gathers made six tensors"
    assert counts["ours"][1] <= counts["plain"][1] - 5
    assert "min(" not in re.sub(r".*u\d+_(start|end).*", "", body), "proven bounds are not clamped"


def rows(x, n):
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return torch.arange(0, n)


def returned(x, n: int):
    return torch.index_select(x, 0, rows(x, n))


def returned_view(x, n: int):
    return torch.index_select(x, 0, rows(x, n)).view(-1)


def overwritten(x, n: int):
    y = torch.index_select(x, 0, rows(x, n))
    x.mul_(2)
    return y + 1, y


def overwritten_and_added(x, n: int):
    y = torch.index_select(x, 0, rows(x, n))
    x.mul_(2)
    return y + 1


def reversed_into_itself(x, n: int):
    torch.ops.k3test.rev_into(torch.index_select(x, 0, rows(x, n)), x)
    return x * 2


def reversed_through_a_clone(x, n: int):
    torch.ops.k3test.rev_into(torch.index_select(x, 0, rows(x, n)).view(-1, 1).clone(), x)
    return x * 2


def scattered_then_zeroed(x, n: int):
    y = torch.index_copy(x, 0, torch.arange(1, 3), -torch.ones(2, 1))
    x.zero_()
    return y


def scattered_then_flipped(x, n: int):
    x.index_copy_(0, torch.arange(x.shape[0]), x * 2.0)
    x.add_(x.flip(0))
    return x + 0


def moved_within(x, n: int):
    index = rows(x, n)
    x.index_copy_(0, index + 1, x.index_select(0, index))
    return x.sum()


PROGRAMS = [
    returned,
    returned_view,
    overwritten,
    overwritten_and_added,
    reversed_into_itself,
    reversed_through_a_clone,
    scattered_then_zeroed,
    scattered_then_flipped,
    moved_within,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dynamic", [True, False])
def test_what_inductor_gets_right_stays_right(fn, dynamic):
    args = [torch.arange(8.0).view(8, 1), 6]
    results = []
    for passes in ((), ATEN_PASSES):
        compiled, _, _ = compile_with(passes, fn, args, dynamic=dynamic)
        results.append(agrees(compiled, fn, args))
    plain, ours = results
    assert ours or not plain


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_that_inductor_gets_right_stay_right(seed):
    text = source(seed + 5000)
    fn = program(text)
    calls = [arguments(2, 5), arguments(0, 0), arguments(3, 8)]
    ours, _, _ = compile_with(ATEN_PASSES, fn, calls[0])
    if not all(agrees(ours, fn, args) for args in calls):
        plain, _, _ = compile_with((), fn, calls[0])
        assert not all(agrees(plain, fn, args) for args in calls), text

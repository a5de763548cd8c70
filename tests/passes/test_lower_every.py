"""No implementation of any op is chosen without the report saying so; they are taken from the registry.

Graphs are made of tensors without data, which can be on a GPU that is not here: a choice needs no more.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from k3compile.kernels import OPS, jit_triton
from k3compile.passes.lower import Lower
from k3compile.passes.runner import Context, run_passes
from pretended_group import pretended_group
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from k3compile.gpu_check.exactness import names_of
from k3compile.gpu_check.rooms import aligned
from k3compile.report import Report

EVERY = [(name, provider) for name, op in OPS.items() for provider in op.implementations]
DEVICES, DTYPES = ("cpu", "cuda"), (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    """It is installed, and the GPU is one with all instructions that any kernel asks for."""
    monkeypatch.setattr(jit_triton, "installed", lambda: True)
    with jit_triton.recording("sm_100"):
        yield


def graph_of(op, args, mode, device):
    """A graph that calls ``op`` on tensors like ``args`` on ``device``."""
    graph = fx.Graph()
    given = []
    for name, arg in zip(names_of(op), args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(name)
            with mode:
                whole = torch.empty(
                    arg.untyped_storage().nbytes() // arg.element_size(), dtype=arg.dtype, device=device
                )
                node.meta["val"] = whole.as_strided(arg.shape, arg.stride(), arg.storage_offset())
            given.append(node)
        else:
            given.append(arg)
    call = graph.call_function(op.overload, tuple(given))
    with mode:
        call.meta["val"] = op.fake_form(*(g.meta["val"] if isinstance(g, fx.Node) else g for g in given))
    graph.output(call)
    return fx.GraphModule(torch.nn.Module(), graph)


def calls(op, group):
    """Samples with something in them, rows aligned, over ``group`` where the op sums over ranks."""
    for dtype in DTYPES:
        for args in op.each_sample(dtype):
            if all(a.numel() for a in args if isinstance(a, torch.Tensor)):
                over = [group if n == "group" else a for n, a in zip(names_of(op), args)]
                yield over
                yield aligned(over)


def lowered(gm, mode, **how):
    """What the call became, and the report of it."""
    records = run_passes(gm, (Lower(**how),), Context("aten", fake_mode=mode))
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function" and "k3" in str(n.target)] or [None]
    return node and node.target, Report("key", "compiled", "eager", {}, tuple(records))


def taken_by(op, provider, group):
    """A graph with a call that the implementation takes, alone or over ``group``, or None."""
    for over, device in product(("", group), DEVICES):
        for args in calls(op, over):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            gm = graph_of(op, args, mode, device)
            given = iter([n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"])
            full = [next(given) if isinstance(a, torch.Tensor) else a for a in args]
            if op.implementations[provider].objection(*full) is None:
                return gm, mode
    return None


@pytest.fixture
def two_ranks():
    with pretended_group(2) as group:
        yield group


@pytest.mark.parametrize(("name", "provider"), EVERY, ids=[f"{n}-{p}" for n, p in EVERY])
def test_an_implementation_that_is_named_is_called_and_said(name, provider, two_ranks):
    op = OPS[name]
    found = taken_by(op, provider, two_ranks)
    assert found is not None, "it takes no sample of its op, on any device or over ranks"
    target, report = lowered(*found, providers={name: provider})
    assert target == getattr(getattr(torch.ops.k3, name), provider)
    note = op.implementations[provider].note
    assert report.choices == {f"k3.{name}": f"computed by {provider}" + (f", {note}" if note else "")}
    assert f"k3.{name}: computed by {provider}" in report.text()


def chosen_by_itself(op, device, fuses):
    """(what the call became, the remark on it) for each sample of an op, nothing being asked for."""
    for args in calls(op, ""):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        target, report = lowered(graph_of(op, args, mode, device), mode, fuses=fuses)
        yield target, report


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted({name for name, _ in EVERY}))
def test_what_is_called_is_what_is_said_and_refusals_have_their_reason(name, device):
    op = OPS[name]
    for target, report in chosen_by_itself(op, device, fuses=False):
        said = report.choices[f"k3.{name}"]
        if target._overloadname == "default":
            assert said == "computed by its meaning"
        else:
            assert said.split(",")[0] == f"computed by {target._overloadname}"
        (remark,) = [r for r in report.remarks if r.op == f"k3.{name}"]
        silent = [p for p in op.implementations if p not in remark.detail and p not in said]
        fits = [p for p in op.implementations if p == target._overloadname]
        assert not silent or fits, f"{silent} were passed over without a word"


def test_a_choice_without_a_word_would_be_seen(monkeypatch):
    op = OPS["experts_unfinalized"]
    made = replace(op.implementations["native"], objection=lambda *args: None)
    monkeypatch.setitem(op.implementations, "native", made)
    monkeypatch.setattr(Lower, "settle", silently(Lower.settle))
    _, report = next(chosen_by_itself(op, "cpu", fuses=False))
    assert "k3.experts_unfinalized" not in report.choices


def silently(settle):
    def quiet(self, gm, node, op, ctx):
        return replace(settle(self, gm, node, op, ctx), op="")

    return quiet

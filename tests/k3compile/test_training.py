"""With open ops gradients are eager's; where an op has no form that can be opened, the compile says so.

The oracle is the op's meaning, in float64, differentiated by eager autograd.
"""

import pytest
import torch
from k3compile.kernels.op import OPS
from lanes import thinned

from k3compile import report

pytestmark = pytest.mark.usefixtures("own_reports")
DIFFERENTIABLE = sorted(name for name, op in OPS.items() if op.pure and op.open_form is not None)
CLOSED = sorted(name for name, op in OPS.items() if op.open_form is None and op.pure)


def sample(name):
    """The first sample in float64, its float64 tensors wanting gradients."""
    args = next(OPS[name].each_sample(torch.float64))
    return [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a
        for a in args
    ]


def gradients(fn, args):
    """Of the sum of squares of every floating result, by argument."""
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(r.square().sum() for r in results if r.requires_grad)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return torch.autograd.grad(total, wanted, allow_unused=True)


def compiled(name):
    torch._dynamo.reset()
    op = getattr(torch.ops.k3, name)
    return torch.compile(lambda *args: op(*args), backend="k3", options={"inner": "aot_eager"})


def oracle(name):
    """The meaning; where it works on detached tensors, the open form, run by eager."""
    results = OPS[name].meaning(*sample(name))
    results = results if isinstance(results, tuple) else (results,)
    return OPS[name].meaning if any(r.requires_grad for r in results) else OPS[name].open_form


@pytest.mark.parametrize("name", thinned(DIFFERENTIABLE, 7))
def test_gradients_of_an_opened_op_are_those_of_its_meaning(name):
    want = gradients(oracle(name), sample(name))
    got = gradients(compiled(name), sample(name))
    assert report.latest().status == "handed on"
    assert [g is None for g in got] == [g is None for g in want]
    for g, w in zip(got, want):
        if w is not None:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CLOSED)
def test_an_op_that_stays_closed_gives_no_gradients_in_silence(name):
    with pytest.raises(Exception, match=f"no gradient goes through k3.{name}"):
        gradients(compiled(name), sample(name))


def test_an_op_that_writes_state_gives_none_in_silence_either():
    q, k, v, g, beta, state, slots, cu = next(OPS["kda_prefill"].each_sample(torch.float64))
    torch._dynamo.reset()
    fn = torch.compile(torch.ops.k3.kda_prefill, backend="k3", options={"inner": "aot_eager"})
    with pytest.raises(Exception, match=r"no gradient goes through k3.kda_prefill"):
        fn(q.clone().requires_grad_(), k, v, g, beta, state, slots, cu)

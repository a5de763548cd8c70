"""What a recording holds, made again on other values, is what the op computes of them."""

import copy
import ctypes
import inspect

import pytest
import torch
from k3compile.kernels import OPS
from k3compile.kernels.native import numbers, unwritten
from torch import Tensor

from k3compile.recording import Recording

BY_ADDRESS = sorted(
    (name, p) for name, op in OPS.items() for p, i in op.implementations.items() if i.by_address
)


def recorded(run, fixed=()):
    """What ``run`` returns, and the recording of it."""
    recording = Recording(fixed)
    with recording.ops():
        result = run()
    return result, recording


def call_again(recording):
    for function, args in recording.calls:
        function(*args)


def tensors(values):
    return [v for v in values if isinstance(v, Tensor)]


def other_values(args):
    for t in tensors(args):
        if t.is_floating_point():
            t.mul_(0.5)


@pytest.mark.parametrize(("name", "provider"), BY_ADDRESS)
def test_an_op_by_address_is_its_calls(name, provider):
    """For every sample: the calls, made again on halved values, give what the op gives for those."""
    implementation, overload = (
        OPS[name].implementations[provider],
        getattr(getattr(torch.ops.k3, name), provider),
    )
    told = 0
    for args in OPS[name].each_sample(torch.float32):
        if implementation.objection(*args) is not None:
            continue
        ints = [t for t in tensors(args) if not t.is_floating_point()]
        result, recording = recorded(lambda args=args: overload(*args), fixed=ints)
        other_values(args)
        anew = copy.deepcopy(args)
        want = implementation.fn(*anew)
        call_again(recording)
        results = result if isinstance(result, tuple) else (result,) if result is not None else ()
        wanted = want if isinstance(want, tuple) else (want,) if want is not None else ()
        for found, expected in zip((*results, *tensors(args)), (*wanted, *tensors(anew)), strict=True):
            assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        told += len(recording.calls) > 0
    assert told, "no sample that this CPU's kernel takes"


@pytest.mark.parametrize("name", ["mla_attend", "mla_attend_block", "mla_attend_shard", "mla_write"])
def test_attention_by_address_is_right_for_other_lengths_and_pages(name):
    """Nothing is fixed: lengths and page tables are read by the C calls alone."""
    op, overload = OPS[name], getattr(torch.ops.k3, name).native
    names = list(inspect.signature(op.meaning).parameters)
    args = max(op.each_sample(torch.float32), key=lambda args: len(args[names.index("seen")]))
    if reason := op.implementations["native"].objection(*args):
        pytest.skip(reason)
    given = dict(zip(names, args))
    result, recording = recorded(lambda: overload(*args))
    assert all(isinstance(function, ctypes._CFuncPtr) for function, _ in recording.calls)
    given["seen"].copy_(given["seen"] // 2)
    given["table"].copy_(given["table"].flip(1))
    anew = copy.deepcopy(args)
    want = overload(*anew)
    call_again(recording)
    if name == "mla_write":
        result, want = args[1], anew[1]
    torch.testing.assert_close(result, want, rtol=0, atol=0)


def test_ops_of_torch_are_called_again_with_what_they_return_where_it_was():
    x = torch.tensor([1.0, 2.0])
    y, recording = recorded(lambda: (x.view(2, 1) * 3).add_(1).sum())
    x.fill_(5.0)
    call_again(recording)
    assert y.item() == 32.0
    assert not recording.refused


def test_a_number_read_on_the_host_is_refused_unless_it_is_fixed():
    x, fixed = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    assert "the host reads numbers" in recorded(lambda: x[1].item())[1].refused
    assert "the host reads numbers" in recorded(lambda: bool(x.sum() > 2))[1].refused
    assert "the host reads numbers" in recorded(lambda: torch.equal(fixed, x))[1].refused
    assert not recorded(lambda: fixed[1].item(), fixed=[fixed])[1].refused


def test_what_has_as_many_rows_as_its_values_say_is_refused():
    x = torch.ones(3)
    assert "as many rows as its values say" in recorded(lambda: x.nonzero())[1].refused


def test_an_op_that_reads_its_values_is_one_call_and_right_for_others():
    args = next(a for a in OPS["mla_attend"].each_sample() if a[5].numel() and a[0].shape[0])
    overload = torch.ops.k3.mla_attend.default  # the meaning, which looks at lengths
    result, recording = recorded(lambda: overload(*args))
    assert len(recording.calls) == 1
    args[0].mul_(0.5)
    call_again(recording)
    assert torch.equal(result, overload(*args))
    assert not recording.refused


def test_reads_inside_an_op_by_address_make_it_one_call(monkeypatch):
    """tolist() goes past the dispatcher; such an op must not be taken for its C calls."""
    op = OPS["linear_bf16"]
    if reason := op.implementations["native"].objection(*next(iter(op.each_sample()))):
        pytest.skip(reason)
    args = next(a for a in op.each_sample() if a[0].numel())
    real = op.implementations["native"]
    for read in (lambda t: t.tolist(), lambda t: t.sum().item(), lambda t: unwritten()):

        def reading(x, w, read=read):
            read(x)
            return real.fn(x, w)

        changed = copy.copy(real)
        object.__setattr__(changed, "fn", reading)
        monkeypatch.setitem(op.implementations, "native", changed)
        _, recording = recorded(lambda: torch.ops.k3.linear_bf16.native(*args))
        (call,) = recording.calls
        assert call[1][0] is reading
        assert not recording.refused


def test_numbers_for_a_kernel_live_as_long_as_the_recording():
    _, recording = recorded(lambda: numbers([1, 2, 3]))
    assert [list(n) for n in recording.kept] == [[1, 2, 3]]


def test_calls_afterwards_are_not_written_down():
    args = next(a for a in OPS["linear_bf16"].each_sample() if a[0].numel())
    if reason := OPS["linear_bf16"].implementations["native"].objection(*args):
        pytest.skip(reason)
    _, recording = recorded(lambda: torch.ops.k3.linear_bf16.native(*args))
    count = len(recording.calls)
    torch.ops.k3.linear_bf16.native(*args)
    assert count == len(recording.calls) == 1


def test_without_generated_code_it_is_refused():
    recording = Recording([])
    with recording.everything():
        torch.ones(2) + 1
    assert recording.refused == "no code that Inductor generated ran"

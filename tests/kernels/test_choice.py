"""Ops outside of graphs: the implementation that lowering chooses, or the meaning, and what is said of it."""

import logging

import pytest
import torch
from k3compile.kernels import OPS, mla_block
from k3compile.kernels.choice import Chosen, by_meaning
from k3compile.kernels.op import Implementation, Tolerance

NAME = "mla_attend_block"


@pytest.fixture
def args():
    *_, args = mla_block.mla_attend_block.each_sample()
    return args


@pytest.fixture
def op(monkeypatch):
    """The op with implementations of ours: one that objects, one coarser than the op, one that fits."""
    op = OPS[NAME]

    def never(*args):
        raise AssertionError("called as an overload, not as a function")

    made = [
        Implementation("triton", never, lambda *args: "cpu tensors"),
        Implementation("coarse", never, lambda *args: None, "", Tolerance()),
        Implementation("native", never, lambda *args: None, "C++"),
    ]
    monkeypatch.setattr(op, "implementations", {i.provider: i for i in made})
    return op


def calls(monkeypatch):
    """Which overloads of the op are called from here on; each gives its name."""

    class Packet:
        def __getattr__(self, overload):
            return lambda *args: overload

    monkeypatch.setattr(torch.ops.k3, NAME, Packet())


def test_the_first_that_does_not_object_computes_it_but_none_that_is_coarser(op, args, monkeypatch):
    calls(monkeypatch)
    chosen = Chosen({})
    assert chosen(NAME, *args) == "native"
    assert chosen.said == {NAME: "computed by native, C++"}


def test_where_all_object_the_meaning_does_and_it_is_said_why(op, args, monkeypatch, caplog):
    calls(monkeypatch)
    for name in ("native", "coarse"):
        del op.implementations[name]
    chosen = Chosen({})
    with caplog.at_level(logging.INFO):
        assert [chosen(NAME, *args) for _ in range(2)] == ["default"] * 2
    said = "computed by its meaning; triton: cpu tensors"
    assert chosen.said == {NAME: said}
    assert [r.getMessage() for r in caplog.records] == [f"k3.{NAME} outside the layers: {said}"]


@pytest.mark.parametrize("wanted", ["meaning", "open", "coarse", "native"])
def test_a_user_is_obeyed(op, args, wanted, monkeypatch):
    calls(monkeypatch)
    assert Chosen({NAME: wanted})(NAME, *args) == {"meaning": "default", "open": "default"}.get(
        wanted, wanted
    )


def test_or_hears_why_not(op, args):
    with pytest.raises(ValueError, match="'triton'} cannot be obeyed outside the layers: cpu tensors"):
        Chosen({NAME: "triton"})(NAME, *args)


def test_both_give_what_the_meaning_gives(args):
    want = OPS[NAME].meaning(*args)
    assert torch.equal(by_meaning(NAME, *args), want)
    torch.testing.assert_close(Chosen({})(NAME, *args), want, rtol=1e-5, atol=1e-6)

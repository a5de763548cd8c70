"""Every way to index rows by an input is found in Dynamo's graph, with what it indexes and where."""

import pytest
import torch
from dynamo_graph import graph_of
from k3compile.passes.index_uses import index_uses


def found(fn, index=None):
    index = torch.arange(3) if index is None else index
    gm = graph_of(fn, torch.rand(4, 5, 3), index, torch.rand(3, 5, 3))
    return [(use.base.target, use.dim, use.index.target) for use in index_uses(gm.graph)]


SPELLINGS = {
    "index_select": (lambda x, i, y: x.index_select(0, i), 0),
    "a function": (lambda x, i, y: torch.index_select(x, 0, i), 0),
    "by name": (lambda x, i, y: torch.index_select(input=x, dim=0, index=i), 0),
    "a negative dimension": (lambda x, i, y: x.index_select(-3, i), -3),
    "an op": (lambda x, i, y: torch.ops.aten.index_select.default(x, 0, i), 0),
    "brackets": (lambda x, i, y: x[i], 0),
    "brackets behind a slice": (lambda x, i, y: x[:, i], 1),
    "brackets behind dots": (lambda x, i, y: x[..., i], 2),
    "brackets before dots": (lambda x, i, y: x[i, ...], 0),
    "brackets behind a new dimension": (lambda x, i, y: x[None, i], 0),
    "gather": (lambda x, i, y: x.gather(0, i[:, None, None].expand(-1, 5, 3)), 0),
    "take_along_dim": (lambda x, i, y: torch.take_along_dim(x, i.view(-1, 1, 1), dim=0), 0),
    "index_copy": (lambda x, i, y: torch.index_copy(x, 0, i, y), 0),
    "index_copy_": (lambda x, i, y: x.clone().index_copy_(0, i, y), 0),
    "assignment": (lambda x, i, y: x.__setitem__(i, y), 0),
    "index_put": (lambda x, i, y: x.index_put((i,), y), 0),
    "index_put_": (lambda x, i, y: x.index_put_((i,), y), 0),
    "scatter": (lambda x, i, y: x.scatter(0, i[:, None, None].expand(-1, 5, 3), y), 0),
    "through a cast": (lambda x, i, y: x[i.int().long()], 0),
}


@pytest.mark.parametrize(("fn", "dim"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_spelling_is_found_with_its_dimension(fn, dim):
    ((_, place, index),) = found(fn)
    assert (place, index) == (dim, "L_i_")


OTHERS = {
    "two indices": lambda x, i, y: x[i, i],
    "arithmetic first": lambda x, i, y: x[i + 1],
    "a slice first": lambda x, i, y: x[i[1:]],
    "not as an index": lambda x, i, y: x[:3] * i[:, None, None],
    "a slice": lambda x, i, y: x[1:3],
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS.keys())
def test_other_uses_are_none(fn):
    assert not found(fn)


def test_masks_and_tables_are_none():
    assert not found(lambda x, i, y: x[i], torch.tensor([True, False, True, True]))
    assert not found(lambda x, i, y: x[i], torch.zeros(2, 2, dtype=torch.int64))

"""A table of indices is traced to the one run it repeats, or is taken for data."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.row_tables import run_behind


def run_of(build, axis, rows=4):
    """Whether ``build(i)`` shows the input ``i`` along ``axis``, in the graph AOTAutograd makes of it."""
    compiled = Compiled(lambda i: build(i) + 0, ())
    table = build(index := torch.arange(7, 7 + rows))
    compiled(index)
    *_, added = (n for n in compiled.graphs[0].graph.nodes if "add" in str(n.target))
    found = run_behind(added.args[0], axis)
    if found is not None:
        assert found.meta["val"].dim() == 1
        moved = table.unsqueeze(-1).movedim(axis, 0).flatten(1)
        assert all(torch.equal(column, index) for column in moved.unbind(1)), "the case itself"
    return found is not None


SHOWN = {
    "itself": (lambda i: i, 0),
    "a column": (lambda i: i[:, None], 0),
    "a row": (lambda i: i[None], 1),
    "columns": (lambda i: i[:, None].expand(-1, 3), 0),
    "columns by name": (lambda i: i.unsqueeze(1).expand(4, 3), 0),
    "rows": (lambda i: i.expand(3, -1), 1),
    "the middle": (lambda i: i.view(1, 4, 1).expand(2, 4, 3), 1),
    "copied and cast": (lambda i: i[:, None].int().contiguous().long(), 0),
    "there and back": (lambda i: i[:, None].squeeze(1)[None].expand(2, -1), 1),
    "as a matrix": (lambda i: i.reshape(-1, 1).expand(-1, 5), 0),
}


@pytest.mark.parametrize(("build", "axis"), SHOWN.values(), ids=SHOWN.keys())
def test_a_repeated_run_is_found(build, axis):
    assert run_of(build, axis)


DATA = {
    "the other axis": (lambda i: i[:, None].expand(-1, 3), 1),
    "one axis of a row": (lambda i: i[None], 0),
    "a square": (lambda i: i.view(2, 2), 0),
    "a square, flattened": (lambda i: i.view(2, 2).t()[None], 1),
    "a sum of two": (lambda i: i[:, None] + i[None, :3], 0),
    "columns in a row": (lambda i: i[:, None].expand(-1, 2).reshape(8, 1), 0),
    "repeated": (lambda i: i[:1, None].expand(4, 1).reshape(1, 4, 1), 1),
}


@pytest.mark.parametrize(("build", "axis"), DATA.values(), ids=DATA.keys())
def test_anything_else_is_data(build, axis):
    assert not run_of(build, axis)

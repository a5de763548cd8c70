"""Writing in place is unseen: results, arguments and aliases are those of the functional graph."""

import random

import pytest
import torch
from compiled import Compiled, check
from functorch.compile import make_boxed_func
from k3compile.passes.in_place import functional_writes, unsafe_views, write_in_place
from lanes import thinned

LIBRARY = torch.library.Library("k3place", "DEF")
LIBRARY.define("bump(Tensor x, Tensor(a!) to) -> Tensor")  # to += x; returns the sum
LIBRARY.impl("bump", lambda x, to: to.add_(x).sum().reshape(1), "CompositeExplicitAutograd")
torch.library.register_fake("k3place::bump", lambda x, to: x.new_empty(1), lib=LIBRARY)
LIBRARY.define("swap(Tensor(a!) one, Tensor(b!) two) -> ()")


def swap(one, two):
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


LIBRARY.impl("swap", swap, "CompositeExplicitAutograd")
torch.library.register_fake("k3place::swap", lambda one, two: None, lib=LIBRARY)
bump, swap_op = torch.ops.k3place.bump, torch.ops.k3place.swap


class InPlace(Compiled):
    """Compiled without passes, then written in place."""

    def __init__(self, fn, **options):
        self.written = []
        super().__init__(fn, (), **options)

    def _optimise(self, gm, inputs):
        super()._optimise(gm, inputs)
        self.written += write_in_place(gm)
        gm.recompile()
        return make_boxed_func(gm.forward)


@pytest.fixture
def holds(monkeypatch):
    """check() of tests/helpers/compiled.py, with writing in place instead of passes; -> {base: refusal}."""

    def run(fn, *calls, **options):
        made = []

        def build(fn, **given):
            made.append(InPlace(fn, **given))
            return made[-1]

        monkeypatch.setattr("compiled.Compiled", build)
        check(fn, *calls, **options)
        return made[0], {w.base: w.refusal for w in made[0].written}

    return run


def test_an_input_that_is_advanced_is_written_in_place_and_not_cloned(holds):
    def fn(x, pool):
        return bump(x * 2, pool) + 1

    compiled, refusals = holds(fn, [torch.ones(3), torch.arange(3.0)])
    assert list(refusals.values()) == [None]
    assert compiled.targets() == ["aten.mul.Tensor", "k3place.bump.default", "aten.add.Tensor"]


def test_a_chain_of_writes_is_written_in_order(holds):
    def fn(x, pool):
        first = bump(x, pool)
        second = bump(pool * 2, pool)
        return first, second, pool.sum()

    compiled, refusals = holds(fn, [torch.ones(3), torch.arange(3.0)])
    assert set(refusals.values()) == {None}
    assert not functional_writes(compiled.graphs[0].graph)


def test_a_tensor_made_in_the_graph_is_written_in_place_and_may_be_returned(holds):
    def fn(x):
        out = torch.zeros_like(x)
        bump(x, out)
        return out, out * 2

    compiled, refusals = holds(fn, [torch.ones(3)])
    assert list(refusals.values()) == [None]
    assert "k3place.bump.default" in compiled.targets()


def test_reading_the_old_value_before_the_write_is_no_obstacle(holds):
    def fn(x, pool):
        old = pool * 1
        bump(x, pool)
        return old.sum()

    _, refusals = holds(fn, [torch.ones(3), torch.arange(3.0)])
    assert list(refusals.values()) == [None]


def functional(fn, *args):
    """The functional graph of ``fn``, to be edited by hand."""
    compiled = Compiled(fn, ())
    compiled(*args)
    return compiled.graphs[0]


def edited(fn, edit, *args):
    """Edit the functional graph, then compare its results before and after writing in place; -> refusals."""
    gm = functional(fn, *args)
    edit(gm.graph)
    gm.graph.lint()
    gm.recompile()
    before = [a.clone() for a in args]
    expected = gm(*before)
    written = write_in_place(gm)
    gm.recompile()
    after = [a.clone() for a in args]
    got = gm(*after)
    for a, b in zip([*before, *expected], [*after, *got]):
        assert torch.equal(a, b)
    return [w.refusal for w in written]


def one(graph, name):
    return next(n for n in graph.nodes if n.name == name)


def step(x, pool):
    return bump(x, pool) + 1


def test_a_later_reader_of_the_old_value_keeps_the_clone():
    def read_old(graph):
        add = one(graph, "add")
        with graph.inserting_before(add):
            old = graph.call_function(torch.ops.aten.sum.default, (one(graph, "arg1_1"),))
            late = graph.call_function(torch.ops.aten.add.Tensor, (add.args[0], old))
        late.meta, old.meta = dict(add.meta), dict(add.meta)
        add.replace_input_with(add.args[0], late)

    (why,) = edited(step, read_old, torch.ones(3), torch.arange(3.0))
    assert why == "sum_default reads its old value later"


def test_a_view_of_the_old_value_that_is_read_later_keeps_the_clone():
    def read_view(graph):
        first = next(n for n in graph.nodes if n.op == "call_function")
        pool, add = one(graph, "arg1_1"), one(graph, "add")
        with graph.inserting_before(first):
            view = graph.call_function(torch.ops.aten.slice.Tensor, (pool, 0, 0, 1))
            view.meta["val"] = pool.meta["val"][0:1]
        with graph.inserting_before(add):
            late = graph.call_function(torch.ops.aten.add.Tensor, (add.args[0], view))
        late.meta = dict(add.meta)
        add.replace_input_with(add.args[0], late)

    (why,) = edited(step, read_view, torch.ones(3), torch.arange(3.0))
    assert "reads its old value later" in why


def test_an_input_without_a_copy_back_keeps_the_clone():
    def forget(graph):
        (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        graph.erase_node(copy)

    assert edited(step, forget, torch.ones(3), torch.arange(3.0)) == [
        "its new value does not end in the input"
    ]


def test_a_new_value_that_is_also_returned_keeps_the_clone():
    def give_out(graph):
        (output,) = graph.find_nodes(op="output")
        new = next(n for n in graph.nodes if n.name == "getitem_1")
        output.args = ((*output.args[0], new),)

    assert edited(step, give_out, torch.ones(3), torch.arange(3.0)) == ["its new value is returned"]


def test_an_op_that_reads_what_it_writes_by_another_argument_keeps_the_clone():
    def read_itself(graph):
        (node,) = functional_writes(graph)
        node.kwargs = {**node.kwargs, "x": one(graph, "arg1_1")}

    (why,) = edited(step, read_itself, torch.ones(3), torch.arange(3.0))
    assert why == "the op also reads it by another argument"


def test_of_two_bases_only_the_safe_one_is_written_in_place():
    def read_old_two(graph):
        (output,) = graph.find_nodes(op="output")
        add = one(graph, "add")
        with graph.inserting_before(output):
            late = graph.call_function(torch.ops.aten.mul.Tensor, (one(graph, "arg1_1"), 3))
        late.meta = dict(one(graph, "arg1_1").meta)
        output.args = ((add, late),)

    def fn(a, b):
        swap_op(a, b)
        return a + 0

    args = torch.ones(3), torch.arange(3.0)
    assert edited(fn, read_old_two, *args) == [None, "mul_tensor reads its old value later"]
    gm = functional(fn, *args)
    read_old_two(gm.graph)
    write_in_place(gm)
    (node,) = functional_writes(gm.graph)
    assert node.kwargs["_only_clone_these_bases"] == (1,)


def view_before_the_write(graph):
    """A slice of the pool, placed first."""
    first = next(n for n in graph.nodes if n.op == "call_function")
    pool = one(graph, "arg1_1")
    with graph.inserting_before(first):
        view = graph.call_function(torch.ops.aten.slice.Tensor, (pool, 0, 0, 9))
    view.meta["val"] = pool.meta["val"][0:]
    return view


def test_a_base_that_is_a_view_of_an_input_is_cloned():
    def write_view(graph):
        (node,) = functional_writes(graph)
        node.kwargs = {**node.kwargs, "_all_bases": [view_before_the_write(graph)]}

    assert edited(step, write_view, torch.ones(3), torch.arange(3.0)) == ["it is a view of an input"]


def test_bases_that_share_memory_are_cloned():
    def share(graph):
        (node,) = functional_writes(graph)
        node.kwargs = {**node.kwargs, "_all_bases": [view_before_the_write(graph), one(graph, "arg1_1")]}

    def fn(a, b):
        swap_op(a, b)
        return a + 0

    refusals = edited(fn, share, torch.ones(3), torch.arange(3.0))
    assert refusals == ["it is a view of an input", "two written arguments share it"]


def test_a_view_of_the_value_between_two_writes_that_is_read_later_keeps_the_clone():
    def twice(x, pool):
        bump(x, pool)
        return bump(x * 2, pool) + 1

    def read_between(graph):
        first, second = functional_writes(graph)
        (new,) = [u for u in first.users if u.args[1] == 1]
        add = one(graph, "add")
        with graph.inserting_before(second):
            view = graph.call_function(torch.ops.aten.slice.Tensor, (new, 0, 0, 1))
            view.meta["val"] = new.meta["val"][0:1]
        with graph.inserting_before(add):
            late = graph.call_function(torch.ops.aten.add.Tensor, (add.args[0], view))
        late.meta = dict(add.meta)
        add.replace_input_with(add.args[0], late)

    first, second = edited(twice, read_between, torch.ones(3), torch.arange(3.0))
    assert first is None
    assert "reads its old value later" in second


def test_memory_shared_in_a_way_no_schema_tells_is_still_seen():
    def hide(graph):
        add, pool = one(graph, "add"), one(graph, "arg1_1")
        first = next(n for n in graph.nodes if n.op == "call_function")
        with graph.inserting_before(first):
            hidden = graph.call_function(torch.Tensor.detach, (pool,))
            hidden.meta["val"] = pool.meta["val"].detach()
        with graph.inserting_before(add):
            late = graph.call_function(torch.ops.aten.add.Tensor, (add.args[0], hidden))
        late.meta = dict(add.meta)
        add.replace_input_with(add.args[0], late)

    (why,) = edited(step, hide, torch.ones(3), torch.arange(3.0))
    assert "reads its old value later" in why


def test_written_slices_become_slices_of_the_base(holds):
    def fn(x, pool):
        bump(x, pool[1:4])
        return pool * 1

    compiled, refusals = holds(fn, [torch.ones(3), torch.arange(6.0)])
    assert list(refusals.values()) == [None]
    assert compiled.targets()[:2] == ["aten.slice.Tensor", "k3place.bump.default"]


def test_written_strided_views_become_strided_views_of_the_base(holds):
    def fn(x, pool):
        bump(x, pool[1:4].unsqueeze(0))
        return pool * 1

    compiled, _ = holds(fn, [torch.ones(1, 3), torch.arange(6.0)])
    assert compiled.targets()[:2] == ["aten.as_strided.default", "k3place.bump.default"]


def test_a_strided_view_at_an_unknown_offset_is_named():
    def fn(n, x, pool):
        start = n[0].item()
        torch._check(start >= 0)
        torch._check(start <= 4)
        bump(x, pool.narrow(0, start, 2).unsqueeze(0))
        return pool * 1

    args = torch.tensor([1]), torch.ones(1, 2), torch.arange(6.0)
    assert unsafe_views(functional(fn, *args).graph) == ["k3place.bump.default(to)"]
    assert unsafe_views(functional(step, torch.ones(3), torch.arange(3.0)).graph) == []


def test_pools_that_are_views_of_one_tensor_are_all_written_in_place(holds):
    def fn(x, a, b):
        return bump(x, a), bump(x, b), bump(x, a)

    whole = torch.arange(6.0)
    _, refusals = holds(fn, [torch.ones(3), whole[:3], whole[3:]])
    assert set(refusals.values()) == {None}
    assert len(refusals) == 2


@pytest.mark.parametrize("seed", thinned(range(25), 7))
def test_random_programs_of_writes_and_reads(holds, seed):
    """Straight-line programs over two pools and views of them, against eager."""
    chance = random.Random(seed)
    plan = [(chance.randrange(5), chance.randrange(2), chance.randrange(4)) for _ in range(6)]

    def fn(x, a, b):
        pools, seen = (a, b), [x.sum()]
        for kind, which, where in plan:
            pool = pools[which]
            if kind == 0:
                seen.append(bump(x * (where + 1), pool))
            elif kind == 1:
                seen.append(bump(x[:2], pool[where : where + 2]))
            elif kind == 2:
                seen.append(pool[where:].sum())
            elif kind == 3:
                swap_op(pools[0], pools[1])
            else:
                seen.append(bump(pools[1 - which], pool))
        return tuple(seen)

    holds(fn, [torch.arange(6.0), torch.ones(6), torch.arange(6.0) * 10])

"""Made-up inputs are valid ones: laid out as asked for, and integers index nothing that is not there."""

import torch
from compiled import Compiled
from k3compile.passes.graph import value

from k3compile.example_values import bound_of, concrete, fitting, random_tensor, synthesised


def placeholders(fn, *args, **options):
    compiled = Compiled(fn, (), **options)
    compiled(*args)
    return compiled.graphs[0].graph.find_nodes(op="placeholder")


def test_an_index_stays_below_the_dimension_it_indexes():
    holes = placeholders(
        lambda x, i: x.index_select(1, i.clone()[1:]), torch.rand(9, 4), torch.tensor([1, 3])
    )
    assert [bound_of(hole) for hole in holes] == [1, 4]
    made = [synthesised(hole, seed) for seed, hole in enumerate(holes)]
    assert made[0].shape == (9, 4)
    assert made[1].max() < 4


def test_two_uses_as_an_index_leave_the_smaller_bound():
    def fn(x, y, i):
        return x[i] + y.index_select(0, i)

    _, index, _ = placeholders(fn, torch.rand(9, 4), torch.rand(3, 4), torch.tensor([1, 2]))
    assert bound_of(index) == 3


def test_an_integer_of_unknown_use_is_zero():
    hole, *_ = placeholders(lambda n: n * 2, torch.tensor([5, 6]))
    assert synthesised(hole, 0).tolist() == [0, 0]


def test_made_up_tensors_have_the_layout_asked_for():
    made = random_tensor([3, 4], [1, 3], torch.bfloat16, "cpu", 1, seed=1)
    assert (made.stride(), made.dtype) == ((1, 3), torch.bfloat16)
    assert made.float().std() > 0.1
    assert random_tensor([3, 4], [0, 1], torch.float32, "cpu", 1, seed=1).stride() == (0, 1)
    assert random_tensor([50], [1], torch.bool, "cpu", 1, seed=1).any()


def test_a_value_fits_by_dtype_and_sizes():
    x, _ = placeholders(lambda x, y: x + y, torch.rand(3, 4), torch.rand(4))
    assert fitting(value(x), torch.rand(3, 4))
    assert not fitting(value(x), torch.rand(4, 3))
    assert not fitting(value(x), torch.rand(3, 4).double())
    assert not fitting(value(x), 3)
    assert not fitting(value(x), value(x)), "a fake tensor holds nothing to run on"


def test_sizes_handed_over_as_symbols_get_their_numbers_from_the_tensors():
    seen = []

    def backend(gm, inputs):
        seen.append(concrete(gm.graph, inputs))
        return gm.forward

    x = torch.rand(7, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(lambda x: x.sum() * x.shape[0], backend=backend)(x)
    y = torch.rand(5, 3)
    torch._dynamo.decorators.mark_unbacked(y, 0)
    torch._dynamo.reset()
    torch.compile(lambda x: x.sum() * x.shape[0], backend=backend)(y)
    sizes = [[given for given in inputs if not isinstance(given, torch.Tensor)] for inputs in seen]
    assert sizes == [[7], [5]]

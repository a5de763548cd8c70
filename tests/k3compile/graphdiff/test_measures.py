"""Sizes are called after what the user gave."""

from k3compile.graphdiff.measures import measures


def node(i, op, target, value=None, args=(), **more):
    return {
        "id": i,
        "name": f"arg{i}_1",
        "op": op,
        "target": target,
        "value": value,
        "args": list(args),
        **more,
    }


def tensor(*shape):
    return {"shape": list(shape), "dtype": "int64"}


def test_the_earliest_dimension_of_an_input_names_a_size_and_the_others_are_known():
    nodes = [
        node(0, "placeholder", "", tensor("u0", "u1"), input="blocks"),
        node(1, "placeholder", "", tensor("u1", 8), input="p"),
    ]
    assert measures(nodes) == {"u0": ("blocks.0",), "u1": ("p.0", "blocks.1")}


def test_a_size_read_from_an_entry_of_an_input_is_called_after_it():
    nodes = [
        node(0, "placeholder", "", tensor(3), input="step.spans"),
        node(1, "call_function", "aten.select.int", tensor(), [{"node": 0}, 0, 2]),
        node(2, "call_function", "aten._local_scalar_dense.default", {"sym": "u4"}, [{"node": 1}]),
        node(3, "call_function", "aten.sum.default", tensor(), [{"node": 0}]),
        node(4, "call_function", "aten._local_scalar_dense.default", {"sym": "u5"}, [{"node": 3}]),
    ]
    assert measures(nodes) == {"u4": ("step.spans[2]",), "u5": ("arg4_1",)}


def test_an_integer_input_is_a_size_and_an_input_without_a_name_of_the_users_keeps_its_own():
    nodes = [
        node(0, "placeholder", "", {"sym": "s0"}, input="n"),
        node(1, "placeholder", "", tensor("s1", "2*s1")),
    ]
    assert measures(nodes) == {"s1": ("arg1_1.0",), "s0": ("n",)}

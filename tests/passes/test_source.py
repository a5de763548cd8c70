"""A node's place in the user's code, and the user's spelling of its arguments."""

import torch
from compiled import Compiled
from k3compile.passes.source import calls, location, positional, spelled


def one_call(x):
    return torch.index_select(x, 0, torch.arange(2)) + 1


def two_calls(x):
    return torch.index_select(x, 0, torch.arange(2)) + x.index_select(0, torch.arange(3, 5))


def method(x):
    return x.index_select(
        0,
        torch.arange(2),
    ).sum()


def nodes(fn):
    compiled = Compiled(fn, ())
    compiled(torch.rand(6, 2))
    return [n for n in compiled.graphs[0].graph.nodes if "index_select" in str(n.target)]


def test_the_innermost_line_of_the_users_code_is_found():
    (node,) = nodes(one_call)
    assert location(node).file == __file__
    assert location(node).line == one_call.__code__.co_firstlineno + 1
    assert str(location(node)) == f"{__file__}:{one_call.__code__.co_firstlineno + 1}"


def test_a_line_inside_torch_is_not_the_users():
    node = torch.fx.Graph().placeholder("x")
    inside = (
        f'  File "{torch.__file__[:-11]}nn/modules/linear.py", line 9, in forward\n    return F.linear()\n'
    )
    node.meta["stack_trace"] = f'  File "{__file__}", line 3, in f\n    x = g(x)\n{inside}'
    assert str(location(node)) == f"{__file__}:3"
    node.meta["stack_trace"] = inside
    assert location(node).line == 9


def test_arguments_are_spelled_as_the_user_wrote_them():
    (node,) = nodes(one_call)
    call = spelled(node, {"index_select"})
    assert positional(call, 0, receiver=True) == "x"
    assert positional(call, 2, receiver=True) == "torch.arange(2)"
    assert positional(call, 3, receiver=True) is None
    (node,) = nodes(method)
    assert positional(spelled(node, {"index_select"}), 0, receiver=True) == "x"


def test_two_calls_on_a_line_are_told_apart_by_where_they_start():
    first, second = nodes(two_calls)
    assert positional(spelled(first, {"index_select"}), 2, receiver=True) == "torch.arange(2)"
    assert positional(spelled(second, {"index_select"}), 2, receiver=True) == "torch.arange(3, 5)"
    first.meta["stack_trace"] = first.meta["stack_trace"].replace("^", "")
    assert spelled(first, {"index_select"}) is None


def test_a_node_without_a_trace_and_a_file_without_python_have_no_place(tmp_path):
    graph = torch.fx.Graph()
    assert location(graph.placeholder("x")) is None
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:")
    assert calls(str(broken)) == ()
    assert calls(str(tmp_path / "absent.py")) == ()

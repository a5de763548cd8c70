"""Costs beside a diff: each pass's share, what Inductor's code does, all layers together."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.cli.diff_costs import cost_rows, costs, generated_rows, step, step_prices, total_rows
from k3compile.cli.diff_inputs import Comparison
from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.timeline import of_passes

CODE = {
    "before": {"launches": 9, "fused": 5, "calls": 4, "allocations": 7},
    "after": {"launches": 6, "fused": 3, "calls": 3, "allocations": 7},
}


def chain(count):
    """An input of s0 rows of 8 floats, and ``count`` operations on it."""
    nodes = [node(0, "placeholder", "x", value=tensor(0, ("s0", 8)), input="p")]
    nodes += [
        node(i, "call_function", "aten.sin.default", [ref(i - 1)], tensor(i, ("s0", 8)))
        for i in range(1, count + 1)
    ]
    return graph([*nodes, node(count + 1, "output", "output", [[ref(count)]])])


def one(times=1, generated=None):
    a, b, c = chain(4), chain(3), chain(1)
    return Comparison(
        "g", times, diff(a, c), of_passes("g", [("p", a, b), ("q", b, c)]), True, generated or {}
    )


def test_numbers_are_told_before_and_after_and_formulas_by_what_was_added():
    rows = cost_rows(one(), {})
    assert "launches 4 -> 1 (-3)" in rows
    assert "bytes_read by -96*p.0" in rows
    assert "bytes_read 1,280 -> 320 (-960)" in cost_rows(one(), {"p.0": 10})


def test_the_code_that_inductor_made_stands_beside_the_estimate():
    rows = cost_rows(one(generated=CODE), {})
    assert rows[0].startswith("estimate: ")
    assert rows[-1] == (
        "inductor's code: launches 9 -> 6 (-3), fused 5 -> 3 (-2), calls 4 -> 3 (-1), allocations 7"
    )
    assert costs(one(generated=CODE), {})["generated"] == CODE
    assert generated_rows({"after": CODE["after"]})[0].startswith("inductor's code: launches 6, fused 3")


def test_each_pass_is_told_its_share():
    assert [price.split(",")[0] for price in step_prices(one(), {})] == ["launches -1", "launches -2"]
    assert "bytes_read -320" in next(step_prices(one(), {"p.0": 10}))


def test_layers_are_added_up():
    rows = total_rows([one(69, CODE), one(1, CODE)], {})
    assert rows[0].startswith("all 70 layers: launches 280 -> 70 (-210), allocations")
    assert rows[1].startswith("all 70 layers, inductor's code: launches 630 -> 420 (-210)")
    assert total_rows([one()], {}) == []
    assert total_rows([one(), one()], {})[0].startswith("all 2 graphs: ")


def test_a_step_is_told_once_where_nothing_changed():
    assert (step(3, 3), step(1200, 900), step("s0", 4)) == ("3", "1,200 -> 900 (-300)", "s0 -> 4")

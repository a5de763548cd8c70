"""Equal changes are told once, with their number."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.folded import units
from k3compile.graphdiff.render_text import text


def layers(count, fast):
    """Each layer: gather, or slice; then an op with a weight of its own."""
    nodes = [node(i, "placeholder", f"w{i}", value=tensor(i)) for i in range(count + 1)]
    x = 0
    for i in range(count):
        at = len(nodes)
        target = "aten.slice.Tensor" if fast else "aten.index_select.default"
        nodes.append(
            node(at, "call_function", target, [ref(x), 0, 4] if fast else [ref(x), 0, ref(i + 1)], tensor(at))
        )
        nodes.append(node(at + 1, "call_function", "aten.add.Tensor", [ref(at), ref(i + 1)], tensor(at + 1)))
        x = at + 1
    return graph([*nodes, node(len(nodes), "output", "output", [[ref(x)]])])


def test_sixty_nine_equal_layers_are_one_line():
    found = diff(layers(69, False), layers(69, True))
    (unit,) = units(found)
    assert unit.times == 69
    assert text(found) == (
        "209 nodes -> 209 nodes: 69 rewritten\n"
        "  rewritten x69: aten.index_select.default -> aten.slice.Tensor\n"
        "    - %n70: f32[s0, 8] = aten.index_select.default(%n0, 0, %n1)\n"
        "    + %n70: f32[s0, 8] = aten.slice.Tensor(%n0, 0, 4)\n"
    )


def test_layers_of_other_shapes_are_told_apart():
    after = layers(6, True)
    after["nodes"][-3]["value"]["dtype"] = "float16"
    assert [u.times for u in units(diff(layers(6, False), after))] == [5, 1]

"""A layer costs what its graph costs for the snapshots it looks at, times the layers; parts add up."""

import dataclasses
from types import SimpleNamespace

from graph_snapshots import graph, node, ref, tensor
from small_models import SMALL

from k3compile.dry_run.mix import Mix, Rows
from k3compile.dry_run.totals import added, snapshots_at, totals_of
from k3compile.dry_run.trace import Part
from k3compile.graphdiff.timeline import Stage, Timeline

TOKENS, WIDTH = 64, 8


def input_of(id, name, shape):
    return node(id, "placeholder", name, value=tensor(id, shape, stride=[WIDTH] * len(shape)), input=name)


def call(id, target, args, shape, module=None):
    value = tensor(id, shape, stride=[WIDTH] * len(shape))
    return node(id, "call_function", target, args, value, module=module)


def gathers(level, *more):
    """p [u0, 8], blocks [u1, u0, 8], i [u0]; a gather by attention, and ``more``."""
    inputs = [input_of(0, "p", ("u0", WIDTH)), input_of(1, "blocks", ("u1", "u0", WIDTH))]
    inputs.append(input_of(2, "i", ("u0",)))
    return graph([*inputs, *more], ("u0", "u1")) | {"level": level}


SUM = call(3, "aten.sum.dim_IntList", [ref(1), [0]], ("u0", WIDTH))
MOVE = call(4, "aten.index_select.default", [ref(0), 0, ref(2)], ("u0", WIDTH), "self_attn")
SEND = call(5, "_c10d_functional.all_reduce.default", [ref(3), "sum", "0"], ("u0", WIDTH))
EXPORT = call(6, "k3.any_export.default", [ref(0)], ("u0", WIDTH), "self_attn")
REPORT = SimpleNamespace(key="graph-1", applied=lambda name: 3, missed=lambda name: ["why"])


def part(layers):
    stages = (
        Stage("captured", gathers("dynamo", SUM)),
        Stage("captured.aten", gathers("aten", SUM, MOVE, SEND, EXPORT)),
        Stage("contiguous_views", gathers("aten", SUM, SEND, EXPORT)),
    )
    return Part("some kind", layers, Timeline("graph-1", stages), REPORT)


def test_each_layer_reads_the_snapshots_it_has():
    assert [snapshots_at(layer, SMALL) for layer in (0, 1, 11, 12, 13)] == [1, 1, 1, 2, 2]
    one, many = (totals_of(part(layers), SMALL, Mix()) for layers in ((1,), (1, 2, 13)))
    moved = TOKENS * WIDTH * 4  # bytes of a snapshot
    assert many.after["bytes_read"] == 3 * one.after["bytes_read"] + moved
    assert many.peak_bytes >= one.peak_bytes


def test_counts_are_those_of_all_layers_before_and_after():
    found = totals_of(part((1, 2, 13)), SMALL, Mix())
    assert (found.before["rows"], found.after["rows"]) == (3, 0)
    assert (found.before["exports"], found.after["exports"]) == (0, 3)  # Dynamo's graph had none
    assert found.before["all_reduce"] == found.after["collectives"] == 3
    assert found.after["collective_bytes"] == 3 * TOKENS * WIDTH * 4
    assert found.before["launches"] - found.after["launches"] == 3
    assert found.applied["latent_tail"] == 3
    assert len(set(found.digests.values())) == 3


def test_what_is_not_compiled_is_the_same_afterwards():
    found = totals_of(part(()), SMALL, Mix())
    assert found.times == 1
    assert not found.compiled
    assert found.before["rows"] == found.after["rows"] == 1


def test_a_smaller_step_moves_less():
    few = Mix(Rows(0, 0), 1, Rows(0, 0))
    sides = [totals_of(part((1,)), SMALL, mix).after for mix in (Mix(), few)]
    assert sides[0]["collective_bytes"] == TOKENS * sides[1]["collective_bytes"]
    assert sides[0]["launches"] == sides[1]["launches"]


def test_a_step_is_the_sum_of_its_parts_with_the_collectives_that_any_of_them_makes():
    one = totals_of(part((1,)), SMALL, Mix())
    silent = one._replace(before={"rows": 1}, after={"rows": 0})
    before, after = added([one, silent, silent])
    assert before["rows"] == 3
    assert after["all_reduce"] == 1


def test_a_model_without_snapshots_has_none_to_read():
    assert snapshots_at(3, dataclasses.replace(SMALL, attn_res_block_size=0)) == 0

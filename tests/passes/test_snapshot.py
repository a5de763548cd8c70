"""Snapshots say the same of the same computation, and different things of different ones."""

import json
import subprocess
import sys

import pytest
import torch
from k3compile.passes.snapshot import SCHEMA, digest, snapshot, text
from latent_tails import EPS, make_args
from pretended_group import pretended_group
from torch.fx.experimental.proxy_tensor import make_fx


def traced(fn, *args, mode="symbolic"):
    return snapshot(make_fx(fn, tracing_mode=mode)(*args))


def test_the_text_names_dtypes_symbols_and_strides():
    def fn(x, w):
        return (x @ w).t() + 1.5

    data = traced(fn, torch.ones(5, 4), torch.ones(4, 3))
    assert text(data) == (
        "%x_1: f32[s0, s1]\n"
        "%w_1: f32[s1, s2]\n"
        "%mm: f32[s0, s2] = aten.mm.default(%x_1, %w_1)\n"
        "%t: f32[s2, s0] stride [1, s2] = aten.t.default(%mm)\n"
        "%add: f32[s2, s0] stride [1, s2] = aten.add.Tensor(%t, 1.5)\n"
        "return %add\n"
    )


def test_it_is_plain_json_of_the_declared_schema():
    data = traced(lambda x: [x.sum(), x.max(0)[1]], torch.ones(5, 4))
    assert json.loads(json.dumps(data)) == data
    assert data["schema"] == SCHEMA
    assert set(data["nodes"][0]) == {
        "id",
        "name",
        "op",
        "target",
        "args",
        "kwargs",
        "value",
        "source",
        "module",
        "from",
        "writes",
    }
    assert [0, 1] in data["edges"]
    assert data["symbols"]["s0"]["min"] == 2


def test_what_a_node_writes_is_told():
    data = traced(lambda x: (x.add_(1), torch.rand(3)), torch.ones(3), mode="fake")
    written = {n["target"]: n["writes"] for n in data["nodes"]}
    assert written["aten.add_.Tensor"] == [0]
    assert written["aten.rand.default"] == ["rng"]
    assert written["output"] == []


def test_the_module_of_a_node_is_a_path_from_the_model():
    seen = {}

    def backend(gm, inputs):
        seen.update(snapshot(gm, "dynamo"))
        return gm.forward

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.GELU()))
    torch.compile(model, backend=backend)(torch.ones(3))
    assert [n["module"] for n in seen["nodes"] if n["op"] == "call_function"] == ["0.0"]


def test_views_share_a_storage_number_and_copies_do_not():
    nodes = traced(lambda x: (x.view(-1), x.clone()), torch.ones(3, 4), mode="fake")["nodes"]
    storage = {n["name"]: n["value"]["storage"] for n in nodes if n["op"] != "output"}
    assert storage["view"] == storage["x_1"] != storage["clone"]


def test_renamed_inputs_keep_the_digest_and_swapped_operands_change_it():
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    base = digest(traced(lambda a, b: a - b, x, y))
    assert digest(traced(lambda left, right: left - right, x, y)) == base
    assert digest(traced(lambda a, b: b - a, x, y)) != base
    assert digest(traced(lambda a, b: a - b, x, y.double())) != base


def test_swapped_outputs_change_the_digest():
    x = torch.ones(3)
    assert digest(traced(lambda a: (a.sin(), a.cos()), x)) != digest(traced(lambda a: (a.cos(), a.sin()), x))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), torch.int32, slice(0, 2), {"a": 1}]
)
def test_odd_arguments_stay_json(value):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.full_like, (x, value)))
    data = snapshot(torch.fx.GraphModule({}, graph))
    json.dumps(data, allow_nan=False)
    text(data)


def test_source_lines_are_the_users_and_short():
    seen = {}

    def backend(gm, inputs):
        seen.update(snapshot(gm, "dynamo"))
        return gm.forward

    torch.compile(lambda x: torch.nn.functional.gelu(x), backend=backend)(torch.ones(3))
    lines = [n["source"] for n in seen["nodes"] if n["op"] == "call_function"]
    assert lines
    assert all(line.startswith("passes/test_snapshot.py:") for line in lines)


PROGRAM = """
import torch, json
from k3compile.passes.snapshot import snapshot, digest
seen = []
def backend(gm, inputs):
    seen.append(snapshot(gm, "dynamo")); return gm.forward
@torch.compile(backend=backend, dynamic=True)
def fn(x, y, n):
    return torch.cat([x * n, y]).view(-1, 2)[: x.shape[0]]
fn(torch.ones(4, 6), torch.ones(3, 6), 7)
print(json.dumps(seen, sort_keys=True))
"""


@pytest.mark.slow
def test_two_processes_write_the_same_bytes():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1", "HOME": "/tmp"}, {"PYTHONHASHSEED": "2", "HOME": "/tmp"})
    ]
    assert runs[0] == runs[1]
    assert b"0x" not in runs[0]


def test_what_an_op_of_ours_sends_is_told_and_is_no_part_of_the_digest():
    made = {}
    for ranks in (2, 4):
        with pretended_group(ranks, name="ours") as name:
            made[ranks] = traced(lambda *args: torch.ops.k3.latent_tail.tiers(*args, EPS, name), *make_args())
    (op,) = [n for n in made[4]["nodes"] if n["op"] == "call_function"]
    few, some, many = op["sends"]
    assert (few["up_to"], some["up_to"], many["up_to"]) == (128, 256, None)
    assert few["collectives"] == 3
    assert isinstance(few["bytes"], str), "symbolic in the rows"
    assert made[2] != made[4]
    assert digest(made[2]) == digest(made[4])
    assert not any("sends" in n for n in traced(torch.sin, torch.ones(2))["nodes"])

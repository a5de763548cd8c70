"""What the passes are worth on the plain, released K3: sites, launches, bytes, allocations of each layer."""

import pytest
from k3compile.passes.expressions import parse
from k3compile.runtime.config import K3Config

from k3compile.graph_capture import capture_kinds
from k3compile.graphdiff.cost import cost
from k3compile.options import CompileOptions

pytestmark = pytest.mark.slow  # four kinds of the released widths are compiled
RELEASED = "tests/data/kimi-k3-config.json"
T, WIDTH, LATENT, TOP_K, HEADS, HEAD = 64, 7168, 3584, 16, 96, 128
QKV = 3 * HEADS * HEAD
MIX = {"p.0": T, "blocks.0": 2, "step.cu_verify.0": 4, "step.cu_other.0": 13}  # 3 verify requests, 12 others
SPANS = {"step.spans[0]": 24, "step.spans[1]": 8, "step.spans[2]": 32}
PAGES = {"step.pages.0": 15, "step.pages.1": 3, "step.seen.0": 15}
COUNTED = ("launches", "allocations", "bytes")


@pytest.fixture(scope="module")
def kinds():
    """{kind: timeline} of the released configuration; its weights are never touched."""
    options = CompileOptions(inner="aot_eager", verify="static", features=("all", "prefix_cache"))
    found = capture_kinds(K3Config.from_file(RELEASED), options)
    assert sum(kind.layers for kind in found) == 93
    return {kind.name: kind.timeline for kind in found}


def at_mix(snapshot):
    """Figures of a graph for one mixed step of 64 tokens."""
    found = cost(snapshot)
    sizes = MIX | SPANS | PAGES
    return found.at({name: sizes[name] for name in map(found.symbols.__getitem__, found.unknown)})


def of_pass(timeline, name):
    """(figures before, figures after, remarks) of one pass."""
    stages = list(timeline.stages)
    place = next(i for i, stage in enumerate(stages) if stage.name == name)
    return at_mix(stages[place - 1].snapshot), at_mix(stages[place].snapshot), stages[place].remarks


def change(before, after):
    moved = {k: after[k] - before[k] for k in ("launches", "allocations")}
    total = sum(after[k] - before[k] for k in ("bytes_read", "bytes_written"))
    return moved | {"bytes": total}


def count(snapshot, *targets):
    return sum(node["target"] in targets for node in snapshot["nodes"])


KDA = ["kda+dense+snapshot", "kda+moe", "kda+moe+snapshot"]
MOE = ["kda+moe", "kda+moe+snapshot", "mla+moe"]
INDEX = ("aten.index_select.default", "aten.index_copy.default")


@pytest.mark.parametrize("kind", KDA)
def test_eight_index_operations_become_none(kinds, kind):
    timeline = kinds[kind]
    before = timeline.stage("aten").snapshot
    moe = 1 if "moe" in kind else 0  # the finalize gathers rows by data
    assert count(before, *INDEX) == 8 + moe
    assert count(timeline.stage("final").snapshot, *INDEX) == 0


@pytest.mark.parametrize("kind", KDA)
def test_the_views_save_the_rows_they_do_not_move(kinds, kind):
    before, after, _ = of_pass(kinds[kind], "contiguous_views")
    gathered = T * (QKV + HEADS * HEAD + HEADS)  # raw q|k|v, decay and beta of every token, in fp32
    scattered = T * HEADS * HEAD
    indices = 3 * 2 * T + 2 * T  # read by six gathers and two scatters...
    made = T  # ...and written once by two aranges
    moved = change(before, after)
    assert moved["launches"] == -10  # eight, and the two aranges
    assert moved["allocations"] == -10  # six gathers, two results of ops, two index tensors
    assert moved["bytes"] <= -(2 * gathered * 4 + 2 * scattered * 4)
    assert moved["bytes"] >= -(2 * gathered * 4 + 2 * scattered * 4 + (indices + made) * 8)


@pytest.mark.parametrize("kind", MOE)
def test_finalize_and_tail_become_one_op(kinds, kind):
    timeline = kinds[kind]
    before, after, remarks = of_pass(timeline, "latent_tail")
    assert [r["kind"] for r in remarks if r["kind"] != "note"] == ["applied"]
    assert count(timeline.stage("final").snapshot, "k3.latent_tail.default", "k3.latent_tail.cpu") == 1
    assert after["collectives"] == before["collectives"] - 2  # a group of one: nothing is sent
    moved = change(before, after)
    assert moved["launches"] <= -10
    rows = T * TOP_K * LATENT * 4
    assert moved["bytes"] <= -5 * rows  # gathered, weighed, masked: written and read again, and summed


@pytest.mark.parametrize("kind", [*KDA, "mla+moe"])
def test_norms_take_over_what_passes_through_memory_before_them(kinds, kind):
    before, after, remarks = of_pass(kinds[kind], "fuse_norm")
    applied = [r for r in remarks if r["kind"] == "applied"]
    assert len(applied) == 2
    promised = {name: sum(int(r["expected"][name]) for r in applied) for name in ("launches", "allocations")}
    moved = change(before, after)
    assert {name: moved[name] for name in promised} == promised
    rows = T * WIDTH * 4
    assert moved["bytes"] == -(5 if "add_mix_norm" in [r["reason"] for r in applied] else 4) * rows


@pytest.mark.parametrize("kind", KDA)
def test_every_prefill_is_exported_at_no_cost_but_two_columns(kinds, kind):
    timeline = kinds[kind]
    before, after, remarks = of_pass(timeline, "state_export")
    assert sorted(r["op"] for r in remarks if r["kind"] == "applied") == ["k3.kda_prefill", "k3.short_conv"]
    assert after["launches"] == before["launches"]
    assert count(timeline.stage("final").snapshot, "k3.kda_prefill.default", "k3.short_conv.default") == 0


def test_all_passes_together(kinds):
    launches = {}
    for name, timeline in kinds.items():
        before, after = at_mix(timeline.stage("aten").snapshot), at_mix(timeline.stage("final").snapshot)
        launches[name] = before["launches"], after["launches"]
        assert after["peak_bytes"] <= before["peak_bytes"]
    assert launches == {
        "kda+dense+snapshot": (38, 24),
        "kda+moe": (53, 28),
        "kda+moe+snapshot": (52, 28),
        "mla+moe": (40, 25),
    }


def test_what_a_proof_says_about_sizes_can_be_read(kinds):
    """The symbols of remarks are those of the snapshots beside them."""
    _, _, remarks = of_pass(kinds["kda+moe"], "contiguous_views")
    known = set(kinds["kda+moe"].stage("aten").snapshot["symbols"])
    named = {
        str(s)
        for r in remarks
        for p in r["proofs"]
        if " <= " in p["expression"]
        for side in p["expression"].split(" <= ")
        for s in parse(side).free_symbols
    }
    assert named
    assert named <= known

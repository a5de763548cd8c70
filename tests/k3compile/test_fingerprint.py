"""Whatever can change a compiled graph changes its fingerprint."""

import torch
from k3compile.runtime.parallel import group
from torch import fx

from k3compile.fingerprint import digest_of, digest_of_sources, fingerprint, groups_of
from k3compile.options import CompileOptions

OPTIONS = CompileOptions()
INPUTS = [torch.ones(2)]


def graph_with_sum(name: str, spelled=torch.ops._c10d_functional.all_reduce) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(spelled, (x, "sum", name)))
    return fx.GraphModule({}, graph)


PLAIN = fx.symbolic_trace(lambda x: x.sin())


def test_it_is_the_same_for_the_same_and_differs_with_options_devices_and_more():
    base = fingerprint(OPTIONS, PLAIN, INPUTS)
    assert fingerprint(CompileOptions(), PLAIN, INPUTS) == base
    others = {
        fingerprint(CompileOptions(features="baseline"), PLAIN, INPUTS),
        fingerprint(OPTIONS, PLAIN, [torch.ones(2, device="meta")]),
        fingerprint(OPTIONS, PLAIN, INPUTS, opened=True),
        fingerprint(OPTIONS, graph_with_sum(group()), INPUTS),
    }
    assert len(others | {base}) == 5


def test_the_number_of_ranks_counts_since_a_lone_sum_is_removed(monkeypatch):
    gm = graph_with_sum(group())
    alone = fingerprint(OPTIONS, gm, INPUTS)
    assert groups_of(gm) == [(group(), 1)]
    assert groups_of(graph_with_sum(group(), torch.ops._c10d_functional.all_reduce.default)) == [(group(), 1)]
    assert groups_of(graph_with_sum("nowhere")) == [("nowhere", None)]
    monkeypatch.setattr("k3compile.fingerprint.ranks_of", lambda name: 8)
    assert fingerprint(OPTIONS, gm, INPUTS) != alone


def test_our_sources_count_kernels_and_passes_included(tmp_path, monkeypatch):
    base = fingerprint(OPTIONS, PLAIN, INPUTS)
    monkeypatch.setattr("k3compile.fingerprint.digest_of_sources", lambda: "edited")
    assert fingerprint(OPTIONS, PLAIN, INPUTS) != base
    assert len(digest_of_sources()) == 64
    one = tmp_path / "a.py"
    one.write_text("x = 1")
    before = digest_of([one])
    one.write_text("x = 2")
    assert digest_of([one]) != before

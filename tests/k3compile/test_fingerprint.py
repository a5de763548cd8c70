"""Whatever can change a compiled graph changes its fingerprint."""

import ast
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from k3compile.runtime.parallel.ranks import group
from torch import fx

import k3compile
from k3compile import kernels, passes
from k3compile.fingerprint import (
    OWN_FILES,
    digest_of,
    digest_of_sources,
    fingerprint,
    groups_of,
    source_files,
)
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


def test_the_ranks_of_an_op_of_ours_count_too():
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "abcdef"]
    graph.output(graph.call_function(torch.ops.k3.latent_tail, (*given, 1e-5, group())))
    assert groups_of(fx.GraphModule({}, graph)) == [(group(), 1)]


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


def test_an_edit_of_any_file_that_can_change_a_graph_changes_the_digest(tmp_path):
    own = Path(k3compile.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    shutil.copytree(own, tmp_path / "own", ignore=ignored)
    copies = [tmp_path / "passes", tmp_path / "kernels"]
    for package, copy in zip((passes, kernels), copies):
        shutil.copytree(package.__path__[0], copy, ignore=ignored)
    files = source_files(tmp_path / "own", copies)
    base = digest_of(files)
    assert base == digest_of_sources()
    assert len(files) > len(OWN_FILES) + 40
    for file in files:
        text = file.read_bytes()
        file.write_bytes(text + b" ")
        assert digest_of(source_files(tmp_path / "own", copies)) != base, file
        file.write_bytes(text)
    (tmp_path / "passes" / "new.py").write_text("")
    assert digest_of(source_files(tmp_path / "own", copies)) != base


WITHOUT_EFFECT = {"dump", "generated", "report", "reproduce"}  # they only tell what was done


def test_every_module_the_backend_uses_is_among_the_sources_or_named_as_without_effect():
    own = Path(k3compile.__file__).parent
    used, todo = set(), ["backend"]
    while todo:
        name = todo.pop()
        if name in used or not (own / f"{name}.py").exists():
            continue
        used.add(name)
        for node in ast.walk(ast.parse((own / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                todo += [node.module] if node.module else [alias.name for alias in node.names]
    assert used - set(OWN_FILES) == WITHOUT_EFFECT


OTHERS = {
    "features": "baseline",
    "inner": "eager",
    "lower": {"rms_norm": "meaning"},
    "verify": "static",
    "on_error": "fallback",
    "require": {"contiguous_views": 1},
    "disable": ("contiguous_views",),
    "range_source": "prove",
}
# where the report goes; what Inductor puts into its keys itself; how the compiled code is called
NOT_OURS = {"report": "somewhere.json", "inductor": {"epilogue_fusion": False}, "replay": False}


@pytest.mark.parametrize("field", dataclasses.fields(CompileOptions), ids=lambda f: f.name)
def test_every_option_that_changes_the_code_counts(field):
    base = fingerprint(OPTIONS, PLAIN, INPUTS)
    if field.name in NOT_OURS:
        given = CompileOptions(**{field.name: NOT_OURS[field.name]})
        assert given != OPTIONS
        assert fingerprint(given, PLAIN, INPUTS) == base
    else:
        assert fingerprint(CompileOptions(**{field.name: OTHERS[field.name]}), PLAIN, INPUTS) != base


def test_it_is_the_same_in_whatever_order_names_were_given():
    one = CompileOptions(
        lower={"rms_norm": "meaning", "l2_norm": "open"}, features=("prefix_cache", "offload")
    )
    other = CompileOptions(
        lower={"l2_norm": "open", "rms_norm": "meaning"}, features=("offload", "prefix_cache")
    )
    assert fingerprint(one, PLAIN, INPUTS) == fingerprint(other, PLAIN, INPUTS)

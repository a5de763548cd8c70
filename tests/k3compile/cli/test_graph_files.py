"""A file is known by its schema, a folder by what K3_DUMP leaves in it; else one is told what to give."""

import json

import pytest
from made_graphs import layered

from k3compile.cli.graph_files import check_model, graphs_in, is_dump, one_graph, schema_of
from k3compile.dump import dumper


def dump(folder, *keys: str) -> None:
    before, after = layered(1), layered(1, views=True)
    for key in keys:
        write = dumper(folder, key)
        write("canonicalize", before, before, 0.1)
        write("contiguous_views", before, after, 0.2)


def test_a_dump_becomes_one_timeline_a_graph(tmp_path):
    dump(tmp_path, "g1", "g2")
    assert is_dump(tmp_path)
    assert is_dump(tmp_path / "g1")
    found = graphs_in(tmp_path)
    assert [t["graph"] for t in found] == ["g1", "g2"]
    assert [s["name"] for s in found[0]["stages"]] == ["captured", "canonicalize", "contiguous_views"]
    assert found[0]["stages"][2]["snapshot"] == layered(1, views=True)
    assert one_graph(tmp_path / "g2")["graph"] == "g2"


def test_the_graph_of_the_next_level_is_a_stage_of_its_own(tmp_path):
    high, low = layered(1) | {"level": "dynamo"}, layered(1)
    write = dumper(tmp_path, "g1")
    write("state_export", high, high, 0.1)
    write("contiguous_views", low, layered(1, views=True), 0.1)
    (found,) = graphs_in(tmp_path)
    names = ["captured", "state_export", "captured.aten", "contiguous_views"]
    assert [s["name"] for s in found["stages"]] == names


def test_of_several_graphs_one_has_to_be_named(tmp_path):
    dump(tmp_path, "g1", "g2")
    with pytest.raises(ValueError, match=r"holds 2 graphs, give one: .*/g1, .*/g2"):
        one_graph(tmp_path)


def test_a_file_is_taken_by_its_schema(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(layered(1)))
    assert schema_of(file) == "k3graph/1"
    assert graphs_in(file) == [layered(1)]


@pytest.mark.parametrize("content", ['{"schema": "k3report/1"}', '{"model_type": "x"}', "[1]", "{", "\x00"])
def test_another_file_is_refused_with_what_is_read(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(
        ValueError, match=r"give a k3graph/1, k3diff/1 or k3timeline/1 JSON file, or a folder"
    ):
        graphs_in(file)


@pytest.mark.parametrize(
    "content", [{}, {"before": {}, "after": {}}, {"before": layered(1), "after": layered(1)}]
)
def test_a_broken_diff_is_refused(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(content | {"schema": "k3diff/1"}))
    with pytest.raises(ValueError, match=r"is a broken k3diff/1 .*: write it again"):
        graphs_in(file)


@pytest.mark.parametrize(
    "content",
    [
        {"schema": "k3graph/1", "nodes": []},
        {k: v for k, v in layered(1).items() if k != "edges"},
        {"schema": "k3timeline/1", "graph": "g", "stages": []},
        {"schema": "k3timeline/1", "graph": "g", "stages": [{"name": "captured"}]},
        {"schema": "k3timeline/1", "graph": "g", "stages": 3},
    ],
)
def test_a_graph_or_timeline_with_a_part_missing_is_refused(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"x.json is a broken k3\w+/1 .*: write it again"):
        graphs_in(file)


def test_a_folder_without_graphs_and_no_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty; expected what K3_DUMP="):
        graphs_in(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder"):
        graphs_in(tmp_path / "none")


def test_a_torn_dump_is_named(tmp_path):
    dump(tmp_path, "g1")
    (tmp_path / "g1" / "00-canonicalize.after.json").unlink()
    with pytest.raises(ValueError, match=r"lacks 00-canonicalize.after.json: the dump is not whole"):
        graphs_in(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xb0\x01", "is not JSON: give a checkpoint's folder, its config.json, or a report"),
        (b"", "is not JSON"),
        (b"[1]", "is JSON, but no configuration of a model (no model_type): give"),
        (b'{"a": 1}', "is JSON, but no configuration of a model (no model_type): give"),
    ],
)
def test_a_file_that_is_no_model_is_told_in_one_line(tmp_path, content, said):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x[.]json") as told:
        check_model(tmp_path / "x.json", "a report")
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_a_dump_that_is_taken_for_a_model_leads_to_the_diff(tmp_path):
    dump(tmp_path, "g1")
    with pytest.raises(ValueError, match="was written by K3_DUMP: `k3 diff "):
        check_model(tmp_path, "a report")
    (tmp_path / "config.json").write_text('{"model_type": "kimi"}')
    check_model(tmp_path / "config.json", "a report")

"""Dumps, timelines and snapshots are read; everything else is refused in one line that says what it is."""

import json

import pytest
from graph_snapshots import graph, node, random_graph

from k3compile.graphdiff.timeline import Stage, Timeline, load, of_passes


def level(name, **more):
    return graph([node(0, "output", "output", [[]])]) | {"level": name} | more


def dump(folder, *passes):
    for number, (name, before, after) in enumerate(passes):
        folder.mkdir(parents=True, exist_ok=True)
        for moment, data in (("before", before), ("after", after)):
            (folder / f"{number:02d}-{name}.{moment}.json").write_text(json.dumps(data))


def test_a_dump_folder_is_a_timeline_a_graph(tmp_path):
    remark = {"pass_name": "two", "kind": "applied"}
    passes = [
        ("one", level("dynamo"), level("dynamo")),
        ("two", level("aten"), level("aten", remarks=[remark], seconds=0.5)),
    ]
    dump(tmp_path / "b", *passes)
    dump(tmp_path / "a", *passes)
    found = load(tmp_path)
    assert [t.graph for t in found] == ["a", "b"]
    assert [s.name for s in found[0].stages] == ["captured", "one", "captured.aten", "two"]
    assert found[0].remarks == [remark]
    assert found[0].stages[-1].seconds == 0.5
    assert load(tmp_path / "a") == [found[0]]


def test_another_body_of_the_same_graph_is_captured_anew():
    one = level("aten", moment="a")
    found = of_passes("g", [("p", one, level("aten", moment="b")), ("p", level("aten", moment="c"), one)])
    assert [s.name for s in found.stages] == ["captured", "p", "captured.aten", "p"]


def test_a_timeline_survives_json(tmp_path):
    found = Timeline(
        "g", (Stage("captured", random_graph(1)), Stage("p", random_graph(2), ({"kind": "note"},), 1.0))
    )
    path = tmp_path / "t.json"
    path.write_text(json.dumps(found.to_json()))
    assert load(path) == [found]


def test_stages_are_found_by_name_and_a_typo_gets_the_nearest():
    found = of_passes(
        "g", [("latent_tail", level("dynamo"), level("dynamo")), ("lower", level("aten"), level("aten"))]
    )
    assert found.stage("final").name == "lower"
    assert found.stage("aten").name == "captured.aten"
    with pytest.raises(
        ValueError, match=r"no stage 'latent_tial' \(did you mean 'latent_tail'\?\); stages: captured"
    ):
        found.stage("latent_tial")


def test_a_missing_file_gets_the_nearest(tmp_path):
    (tmp_path / "before.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no such file or folder \(did you mean '.*before.json'\?\)"):
        load(tmp_path / "befor.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not JSON; expected a snapshot"),
        ("\udcff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is JSON without a schema; expected 'k3graph/1' or 'k3timeline/1'"),
        ("[1]", "is JSON without a schema"),
        ('{"schema": "k3report/1"}', "is JSON of schema 'k3report/1'"),
        ('{"schema": "k3timeline/1"}', "a broken k3timeline/1 file"),
        ('{"schema": "k3graph/1", "nodes": [1]}', "not a graph snapshot"),
    ],
)
def test_a_wrong_file_is_told_for_what_it_is(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=said) as error:
        load(path)
    assert "x.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_without_a_dump_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match="is empty; expected what K3_DUMP="):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="holds no dumped graph"):
        load(tmp_path)


def test_half_a_dump_is_told(tmp_path):
    dump(tmp_path / "g", ("one", level("aten"), level("aten")))
    (tmp_path / "g" / "00-one.after.json").unlink()
    with pytest.raises(ValueError, match=r"lacks 00-one.after.json: the dump is not whole"):
        load(tmp_path)

"""A graph is counted by op, symbol and storage; a timeline also by what each pass changed."""

import json

import pytest
from made_graphs import delta, layered, timeline

from k3compile.cli.main import main


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["inspect", *arguments])
    return left.value.code, capsys.readouterr().out


def test_a_graph_is_counted(tmp_path, capsys):
    file = tmp_path / "g.json"
    file.write_text(json.dumps(layered(2)))
    code, out = run(capsys, str(file))
    assert code == 0
    assert "graph g.json (aten level): 53 nodes" in out
    assert "aten.mm.default 40" in " ".join(out.split())
    assert "symbols: 2 <= s0, 0 <= u0" in out
    assert "storages: 14, of which 2 are shared" in out
    assert "s12: mm_0_0, mm_0_1" in out
    assert "and 12 more" in out
    code, out = run(capsys, str(file), "--json")
    (found,) = json.loads(out)
    assert found["ops"]["aten.index_select.default"] == 4
    assert len(found["shared"]["12"]) == 20


def test_passes_are_listed_with_what_they_changed(tmp_path, capsys):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(timeline(1)))
    code, out = run(capsys, str(file), "--json")
    (found,) = json.loads(out)
    assert code == 0
    assert found["graph"] == "0f3a"
    first, second = found["passes"]
    assert first == {
        "name": "canonicalize", "nodes": 28, "added": 0, "removed": 0, "rewritten": 0, "moved": 0, "meta": 0
    }  # fmt: skip
    assert (second["name"], second["nodes"]) == ("contiguous_views", 27)
    assert second["rewritten"] > 0
    assert "contiguous_views" in run(capsys, str(file))[1]


def test_a_diff_counts_its_changes(tmp_path, capsys):
    before, after = layered(3), layered(3, views=True)
    found = {"schema": "k3diff/1", "before": before, "after": after, "costs": None, **delta(before, after)}
    file = tmp_path / "d.json"
    file.write_text(json.dumps(found))
    (got,) = json.loads(run(capsys, str(file), "--json")[1])
    assert got["passes"] == [
        {"name": "diff", "nodes": 75, "added": 0, "removed": 3, "rewritten": 6, "moved": 0, "meta": 0}
    ]

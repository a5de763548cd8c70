import json

from k3compile.passes.snapshot import snapshot
from k3compile.passes.symbol_names import SymbolNames
from torch import fx, sin

from k3compile.dump import dumper, recording, told_in


def test_without_a_folder_nothing_is_written():
    assert dumper(None, "key") is None


def test_passes_are_numbered_and_written_as_json_and_text(tmp_path):
    data = snapshot(fx.symbolic_trace(lambda x: sin(x)))
    write = dumper(tmp_path, "key")
    write("first", data, data, 0.1)
    write("second", data, data, 0.1)
    names = sorted(p.name for p in (tmp_path / "key").iterdir())
    kinds = ["after.json", "after.txt", "before.json", "before.txt"]
    assert names[:4] == [f"00-first.{kind}" for kind in kinds]
    assert names[4].startswith("01-second")
    assert json.loads((tmp_path / "key" / names[0]).read_text()) == data
    assert "sin(%x)" in (tmp_path / "key" / names[1]).read_text()


def test_what_runs_inside_is_recorded_without_a_folder():
    with recording() as seen:
        dumper(None, "key")("first", {"nodes": []}, {"nodes": [1]}, 0.1)
    assert [(s.key, s.name, s.after) for s in seen] == [("key", "first", {"nodes": [1]})]
    assert dumper(None, "key") is None


def test_remarks_speak_the_language_of_the_snapshot_and_name_no_folder_of_this_machine():
    remark = {"pass_name": "p", "kind": "applied", "node": "n", "op": "o", "reason": "rows [0, u7)"}
    remark |= {
        "detail": "",
        "source": "/home/me/model/file.py:3",
        "proofs": [],
        "fix_it": None,
        "expected": {},
    }
    names, told = SymbolNames(), []
    names.name("u7")
    told_in(names, lambda *given: told.append(given))("p", {}, {"remarks": [remark]}, 0.5)
    ((name, _, after, seconds),) = told
    assert (name, seconds) == ("p", 0.5)
    assert after["remarks"][0]["reason"] == "rows [0, u0)"
    assert after["remarks"][0]["source"] == "model/file.py:3"

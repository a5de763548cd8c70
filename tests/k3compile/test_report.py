"""A report survives the way to disk and back, is written whole or not at all, and is one for an artifact."""

import json
from dataclasses import replace

import pytest
from k3compile.passes.remarks import PassRecord, Proof, Remark

from k3compile import report
from k3compile.report import Report, folded, keep, stored, with_lines_of

PROOF = Proof("end <= size", "static", "u0 <= s0")
APPLIED = Remark("views", "applied", "n1", "aten.index_select", "rows [0, u0)", "view", "a/m.py:3", (PROOF,))
MISSED = Remark("views", "missed", "n2", "aten.index", "comes from x", "", "a/m.py:9", fix_it="check it")
RECORD = PassRecord("views", 0.25, True, (APPLIED, MISSED, replace(APPLIED, node="n3")), 9, 8)
REPORT = Report(
    key="k1",
    status="compiled",
    inner="eager",
    features={"contiguous_views": "on"},
    records=(RECORD,),
    notes=("a note",),
    graphs=(("aten", "d1"),),
    seconds=1.5,
    sources=(None, "a/m.py:3", "a/m.py:9"),
    torch="2.13.0",
)


@pytest.fixture(autouse=True)
def _forget():
    report.forget()
    yield
    report.forget()


def test_a_report_read_back_is_equal():
    assert Report.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match="not a k3report/1"):
        Report.from_json(REPORT.to_json() | {"schema": "k3report/9"})


def test_counts_and_reasons_come_from_the_remarks():
    assert REPORT.applied("views") == 2
    assert REPORT.missed("views") == ["comes from x"]
    assert REPORT.pass_seconds == 0.25


def test_equal_remarks_are_folded_and_proofs_shown():
    lines = folded(RECORD.remarks)
    assert lines == [
        "applied x2 aten.index_select at a/m.py:3: rows [0, u0) (view)",
        "    end <= size: u0 <= s0 [static]",
        "missed aten.index at a/m.py:9: comes from x",
        "    fix: check it",
    ]
    assert all(line.strip() in REPORT.text() for line in lines)


def test_choices_say_what_computes_each_op():
    said = [
        Remark("lower", "applied", "a", "k3.x", "opened"),
        Remark("lower", "note", "b", "k3.x", "its meaning"),
    ]
    made = replace(REPORT, records=(PassRecord("lower", 0.0, True, tuple(said), 1, 1),))
    assert made.choices == {"k3.x": "opened / its meaning"}


def test_keeping_twice_is_keeping_once(tmp_path):
    keep(REPORT, tmp_path)
    keep(replace(REPORT, key="k2"), tmp_path)
    again = keep(replace(REPORT, seconds=9.0), tmp_path)
    assert [r.key for r in report.all()] == ["k2", "k1"]
    assert report.latest() == again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k1.json", "k2.json"]


def test_a_report_is_found_again_by_its_key(tmp_path):
    keep(REPORT, tmp_path)
    assert stored("k1", tmp_path) == REPORT
    assert stored("k2", tmp_path) is None


def test_a_torn_or_foreign_file_is_ignored_with_a_warning(tmp_path, caplog):
    text = json.dumps(REPORT.to_json())
    for damaged in (text[:50], "[]", '{"schema": "k3report/1"}', text.replace('"records"', '"recrods"')):
        (tmp_path / "k1.json").write_text(damaged)
        caplog.clear()
        assert stored("k1", tmp_path) is None
        assert "is not a report and is ignored" in caplog.text


def test_a_cached_report_does_not_overwrite_the_stored_one(tmp_path):
    keep(REPORT, tmp_path)
    before = (tmp_path / "k1.json").read_text()
    keep(replace(REPORT, status="cached"), tmp_path)
    assert (tmp_path / "k1.json").read_text() == before


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert keep(REPORT, tmp_path / "file" / "below") == REPORT
    assert report.latest() == REPORT
    assert "was not stored" in caplog.text


def test_nothing_temporary_is_left_behind(tmp_path):
    keep(REPORT, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["k1.json"]


def test_the_users_file_holds_every_report_that_asked_for_it(tmp_path):
    file = tmp_path / "mine" / "reports.json"
    keep(REPORT, tmp_path, str(file))
    keep(replace(REPORT, key="k2"), tmp_path, str(file))
    keep(replace(REPORT, key="k3"), tmp_path)
    data = json.loads(file.read_text())
    assert [r["key"] for r in data["reports"]] == ["k1", "k2"]


def test_lines_follow_the_code_when_the_file_has_moved():
    moved = with_lines_of(REPORT, (None, "a/m.py:13", "a/m.py:19"))
    assert [r.source for r in moved.remarks] == ["a/m.py:13", "a/m.py:19", "a/m.py:13"]
    assert with_lines_of(REPORT, REPORT.sources) is REPORT


def test_before_the_first_compile_there_is_no_latest_report():
    with pytest.raises(LookupError, match="nothing was compiled"):
        report.latest()

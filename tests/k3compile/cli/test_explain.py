"""`k3 explain`: every site of a checkpoint's layers, or what one pass is for."""

import json
from dataclasses import replace

import pytest
from k3compile.passes.remarks import PassRecord, Remark
from k3compile.runtime.config import K3Config
from small_models import SMALL

from k3compile import torch_private
from k3compile.cli.explain import explain
from k3compile.report import Report, keep


@pytest.fixture(autouse=True)
def _own_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_private, "cache_folder", lambda: tmp_path / "reports")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder that stands for the small configuration."""
    monkeypatch.setattr(K3Config, "from_file", classmethod(lambda cls, path: SMALL))
    return str(tmp_path)


@pytest.fixture
def thin(tmp_path, monkeypatch):
    """A folder that stands for one with two kinds of layer."""
    config = replace(SMALL, num_hidden_layers=3, kda_layers=(0,), attn_res_block_size=0)
    monkeypatch.setattr(K3Config, "from_file", classmethod(lambda cls, path: config))
    return str(tmp_path)


def test_every_pass_is_explained_with_equal_layers_folded(checkpoint, capsys):
    assert explain(checkpoint) == 0
    text = capsys.readouterr().out
    assert "14 layers of 4 kinds, compiled for aot_eager" in text
    assert "kda+moe x8" in text
    assert "contiguous_views: 80 applied" in text
    assert "x10   applied aten.index_select at runtime/attention.py:" in text
    assert "end <= size" in text
    assert "k3.rms_norm" in text.split("\nlower: ")[1]


@pytest.mark.slow
def test_one_pass_as_json(thin, capsys):
    assert explain(thin, pass_name="contiguous_views", as_json=True) == 0
    kinds = json.loads(capsys.readouterr().out)
    assert [(k["name"], k["layers"]) for k in kinds if k["kind"][0] == "mla"] == [("mla+moe", 2)]
    for kind in kinds:
        assert [r["name"] for r in kind["report"]["records"]] == ["contiguous_views"]
    remarks = [r for k in kinds for rec in k["report"]["records"] for r in rec["remarks"]]
    assert all(r["proofs"] and r["source"] for r in remarks if r["kind"] == "applied")


def test_a_pass_is_explained_in_its_own_words_with_its_last_counts(capsys):
    site = Remark("contiguous_views", "applied", "n", "aten.index_select", "rows")
    sites = site, site, replace(site, kind="missed")
    record = PassRecord("contiguous_views", 0.1, True, sites, 5, 5)
    keep(Report("graph-1", "compiled", "eager", {}, (record,)), torch_private.cache_folder())
    assert explain("contiguous_views") == 0
    text = capsys.readouterr().out
    assert "contiguous_views (aten level, exact)" in text
    assert "contiguous rows" in text
    assert "graph graph-1: applied 2, missed 1" in text
    assert explain("lower", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["last"] == []


def test_a_wrong_switch_is_refused_before_anything_is_compiled(checkpoint, monkeypatch):
    monkeypatch.setenv("K3_FUEL", "many")
    with pytest.raises(ValueError, match="K3_FUEL is 'many'; it is a number of rewrites"):
        explain(checkpoint)


def test_neither_a_folder_nor_a_pass_is_refused_with_the_names():
    with pytest.raises(
        ValueError, match=r"'tail' is neither a folder, a report nor a pass; passes: .*contiguous_views"
    ):
        explain("tail")
    with pytest.raises(ValueError, match=r"--pass is 'nothing'; passes: "):
        explain("contiguous_views", pass_name="nothing")


def test_a_report_file_is_read_back(tmp_path, capsys):
    site = Remark(
        "contiguous_views", "missed", "n", "aten.index_select", "the end is not proven", fix_it="do"
    )
    other = Remark("lower", "applied", "m", "k3.rms_norm", "opened")
    records = (
        PassRecord("contiguous_views", 0.1, True, (site,), 5, 5),
        PassRecord("lower", 0.1, True, (other,), 5, 5),
    )
    file = tmp_path / "report.json"
    keep(Report("graph-1", "compiled", "eager", {}, records), tmp_path / "r", str(file))
    assert explain(str(file)) == 0
    text = capsys.readouterr().out
    assert "missed aten.index_select: the end is not proven" in text
    assert "fix: do" in text
    assert "k3.rms_norm" in text
    assert explain(str(file), pass_name="lower") == 0
    assert "index_select" not in capsys.readouterr().out
    assert explain(str(tmp_path / "r" / "graph-1.json"), as_json=True) == 0
    assert [r["key"] for r in json.loads(capsys.readouterr().out)] == ["graph-1"]


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ('{"schema": "k3graph/1"}', "is a k3graph/1, not a report: look at it with `k3 inspect"),
        ('{"schema": "k3report/1"}', "is a damaged k3report/1, 'records' is wrong: compile again"),
    ],
)
def test_a_file_that_is_no_report_is_named_with_what_to_do(tmp_path, content, want):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=want):
        explain(str(file))

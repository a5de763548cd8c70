"""The doctor finds this machine well, and says what to do where it is not."""

import json
import shutil
import sysconfig
from importlib import metadata

from k3compile.cli import doctor


def test_this_machine_is_well(capsys):
    assert doctor.doctor(as_json=True) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["torch"]["found"].startswith("2.13.")
    assert found['torch.compile(backend="k3")']["found"] == "k3compile.entry:k3"
    assert found["C++ compiler"]["ok"]
    assert found["compile cache"]["ok"]


def test_a_missing_compiler_is_told_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "CHECKS", [doctor.compiler])
    assert doctor.doctor() == 1
    assert "apt install g++" in " ".join(capsys.readouterr().out.split())


def test_missing_headers_are_told_with_the_remedy(monkeypatch, tmp_path):
    assert doctor.headers().ok
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert doctor.headers().ok is False
    assert "apt install python3-dev" in doctor.headers().advice


def test_a_missing_library_and_entry_point_are_told(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert "tiktoken" in doctor.libraries().advice
    assert doctor.libraries().ok is False
    assert doctor.package().ok is False
    assert doctor.entry_point().ok is False


def test_a_full_disk_is_told(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert doctor.cache().ok is False

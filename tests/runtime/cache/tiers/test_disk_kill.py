"""Writers that are killed, or may not write, leave a folder from which others serve right entries alone."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "helpers" / "store_and_die.py"
ACCEPT = os.environ.get("K3_ACCEPT") == "1"


def run(*arguments: object) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def killed(folder: Path, rounds: int, seed: int) -> None:
    seen = run("kill", folder, rounds, seed)
    assert seen["wrong"] == 0
    assert seen["refused"] == 0
    assert seen["warnings"] == []  # not even a torn file was there to be ignored
    assert seen["parts"] >= rounds // 10, "hardly any kill met a writer at work: the test shows nothing"
    assert seen["served"] > rounds
    assert seen["largest"] <= 3_000_000 * 1.25  # each may write a sixteenth before it sees what the other did


@pytest.mark.slow
def test_writers_killed_at_any_moment_leave_only_whole_entries(tmp_path):
    killed(tmp_path / "tier", 20, seed=0)


@pytest.mark.slow
def test_many_writers_killed_at_any_moment_leave_only_whole_entries(tmp_path):
    killed(tmp_path / "tier", 1000 if ACCEPT else 200, seed=1)


def engines_killed(folder: Path, rounds: int, seed: int) -> None:
    seen = run("serve", folder, rounds, seed)
    assert seen["wrong"] == 0
    assert seen["warnings"] == []
    assert seen["cached"] > 28 * rounds  # of 180 tokens of six prompts


@pytest.mark.slow
def test_an_engine_killed_while_it_serves_leaves_a_folder_from_which_the_next_serves_right(tmp_path):
    engines_killed(tmp_path / "tier", 5, seed=0)


@pytest.mark.slow
def test_many_engines_killed_while_they_serve_leave_a_folder_from_which_the_next_serves_right(tmp_path):
    engines_killed(tmp_path / "tier", 200 if ACCEPT else 40, seed=1)


def test_without_rights_or_beyond_a_limit_a_store_is_declined_and_loads_go_on(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):  # down to the system's own: the writer is nobody
        if folder == Path(tempfile.gettempdir()):
            break
        os.chmod(folder, 0o755)
    seen = run("refuse", tmp_path / "tier")
    assert seen["without the right"] == "io_error True 0"
    assert seen["beyond the limit"] == "disk_full True 0"

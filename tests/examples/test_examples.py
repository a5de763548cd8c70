"""Each lesson runs as a reader would run it, and prints what it teaches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
TEACHES = {
    "01_see_a_rewrite.py": "index operations: 4 -> 0",
    "02_see_a_refusal.py": "add torch._check(sizes[0].item() <= x.shape[0])",
    "03_write_a_pass.py": "applied aten.mul",
    "04_write_an_op.py": "unit_rows",
    "05_generate.py": "completion_tokens=8",
    "06_compare_two_graphs.py": "other names: no difference",
    "07_promise_a_range.py": "graphs: 1",
    "08_leave_a_checkpoint.py": "same bits as a run that stops there: True",
    "09_train_k3_tiny.py": "2 steps, 4,096 tokens",
}
SHORT = ["out", "--steps=2", "--draft-steps=2", "--problems=1", "--eager"]  # what a test has the time for
ARGUMENTS = {"09_train_k3_tiny.py": SHORT}
FAST = ("01_see_a_rewrite.py",)


def test_every_lesson_is_run():
    lessons = {p.name for p in FOLDER.glob("[0-9]*.py")}
    assert lessons == set(TEACHES)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in sorted(TEACHES)]
)
def test_a_lesson_runs_alone_and_prints_what_it_teaches(name, tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(FOLDER / name), *ARGUMENTS.get(name, [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert TEACHES[name] in ran.stdout


def test_lessons_fit_on_a_screen():
    assert not {p.name for p in FOLDER.glob("*.py") if len(p.read_text().splitlines()) >= 50}

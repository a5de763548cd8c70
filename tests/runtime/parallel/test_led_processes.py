"""Leader and follower as processes over gloo, whose collectives a recorder compares at every command."""

import json
import subprocess
import sys
from pathlib import Path

import led_processes
import pytest
from k3compile.runtime.make_engine import make_engine
from led_ranks import Parts

PROGRAM = Path(led_processes.__file__)


def run(folder: Path, *more: str, ranks: int = 2) -> list[tuple[int, str]]:
    """Exit code and what was said on stderr, by rank."""
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(ranks), str(folder), *more],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=150)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said)]


@pytest.mark.tp
@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_by_the_same_collectives(tmp_path):
    ended = run(tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    got, error = json.loads((tmp_path / "answers.json").read_text())
    parts = Parts(draft=True)
    alone = led_processes.serve(make_engine(parts.target, led_processes.CONFIG, None, parts.draft))
    assert (got, error) == (alone, None)
    lists = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert lists[0] == lists[1]
    assert "broadcast_ [4096] int64 over 2\nallreduce_" in lists[0]


@pytest.mark.tp
@pytest.mark.slow
def test_a_fault_of_one_rank_ends_it_and_everybody_on_rank_0_is_told(tmp_path):
    ended = run(tmp_path, "3")
    assert ended[1][0] == 1
    assert "RuntimeError: a fault of this rank alone" in ended[1][1]
    assert "this rank follows and ends here, after" in ended[1][1]
    got, error = json.loads((tmp_path / "answers.json").read_text())
    assert error.startswith("command ")
    assert error.endswith("failed on rank 0: another rank, or the way to it, is gone")
    assert all(reason and reason in error for _, reason in got.values())

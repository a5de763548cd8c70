"""Ranks that do many jobs, say what went wrong, and are gone afterwards."""

import os
import subprocess
import sys
import time

import pytest
from rank_jobs import LEFT, ends_on_rank_0, fails_on_rank_1, stands_still, summed
from rank_pool import RankFailed, RankPool, alive

pytestmark = [pytest.mark.slow, pytest.mark.tp]


def gone(pids):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_jobs_are_done_by_all_ranks_and_what_they_leave_is_there_for_the_next():
    with RankPool(2) as pool:
        assert pool.run(summed, 1) == [(11.0, [1])] * 2
        assert pool.run(summed, 2) == [(22.0, [1, 2])] * 2
        assert all(alive(pid) for pid in pool.pids)
        pids = pool.pids
    assert gone(pids)
    assert LEFT == []


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (fails_on_rank_1, r"(?s)fails_on_rank_1 failed on ranks \[.*1.*\] of 2.*does not want to"),
        (ends_on_rank_0, "rank 0: ended with exit code 7"),
        (stands_still, r"stands_still failed on ranks \[\] of 2; \[0, 1\] not done"),
    ],
)
def test_a_job_that_fails_says_where_and_leaves_nobody_behind(job, said):
    with RankPool(2) as pool:
        pids = pool.pids
        started = time.monotonic()
        with pytest.raises(RankFailed, match=said):
            pool.run(job, timeout_s=2)
        assert time.monotonic() - started < 10
        assert pool.closed
        assert gone(pids)


def test_ranks_end_with_the_process_that_started_them():
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from rank_pool import RankPool\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    print(*pool.pids, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == -9, ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    assert gone(pids)

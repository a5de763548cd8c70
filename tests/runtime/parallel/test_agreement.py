"""Ranks that differ end together with one message, and none waits for a rank that will not come."""

import json
import threading
import time

import pytest
import torch.distributed as dist
from k3compile.runtime.parallel import agreement, waiting
from k3compile.runtime.parallel.agreement import (
    Apart,
    Disagreement,
    Meeting,
    differences,
    named,
)

SETTINGS = {
    "engine": {"max_num_seqs": 16, "page_size": 64},
    "dtype": "float32",
    "versions": {"torch": "2.13"},
}


def meet(size, work, ranks=None, patience_s=20.0):
    """What ``work(meeting)`` gave or raised on each of ``ranks`` (default: all), as threads."""
    store, out = dist.HashStore(), {}

    def run(rank):
        try:
            out[rank] = work(Meeting(store, rank, size, patience_s))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [out[rank] for rank in sorted(out)]


def test_ranks_that_say_the_same_go_on():
    def work(meeting):
        meeting.agree(SETTINGS)
        return meeting.reached("loaded", {"rank": meeting.rank})

    assert meet(3, work) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_every_rank_ends_with_one_error_that_lists_all_differences():
    def work(meeting):
        mine = json.loads(json.dumps(SETTINGS))
        if meeting.rank in (1, 3):
            mine["engine"]["max_num_seqs"] = 8
        if meeting.rank == 2:
            mine |= {"dtype": "bfloat16", "draft": {"config.json": "1 bytes"}}
            del mine["versions"]["torch"]
        meeting.agree(mine)

    errors = meet(5, work)
    assert {type(error) for error in errors} == {Disagreement}
    assert len({str(error) for error in errors}) == 1
    assert errors[0].differences == [
        "engine.max_num_seqs: 16 on ranks 0, 2, 4 and 8 on ranks 1, 3",
        'dtype: "float32" on ranks 0-1, 3-4 and "bfloat16" on rank 2',
        'versions.torch: "2.13" on ranks 0-1, 3-4 and nothing on rank 2',
        'draft.config.json: nothing on ranks 0-1, 3-4 and "1 bytes" on rank 2',
    ]
    assert all(line in str(errors[0]) for line in errors[0].differences)


def test_what_means_the_same_is_no_difference():
    assert not differences([{"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}])
    assert differences([{"a": 1}, {"a": True}])


def test_of_very_many_differences_the_text_has_the_first():
    error = Disagreement([f"tensor {i}" for i in range(100)])
    assert len(error.differences) == 100
    assert "tensor 59" in str(error)
    assert "tensor 60" not in str(error)
    assert "... and 40 more" in str(error)


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(agreement, "GOODBYE_S", 0.2)
    start = time.monotonic()
    errors = meet(5, lambda meeting: meeting.agree(SETTINGS), ranks=[0, 1, 3], patience_s=0.5)
    assert time.monotonic() - start < 10
    for error in errors:
        assert type(error) is Apart
        assert str(error).startswith("ranks 2, 4 of 5 did not get to 'settings' in 0.5 s")


@pytest.mark.slow
def test_the_first_of_those_that_wait_says_for_whom_and_how_long(monkeypatch, caplog):
    monkeypatch.setattr(agreement, "GOODBYE_S", 0.2)
    monkeypatch.setattr(waiting, "FIRST_S", 0.3)
    meet(3, lambda meeting: meeting.agree(SETTINGS), ranks=[1, 2], patience_s=1.0)
    assert caplog.messages == ["waiting for rank 0 at 'settings' (0 s of 1 s)"] + [
        "waiting for rank 0 at 'settings' (1 s of 1 s)"
    ]


def test_rank_0_leaves_last(monkeypatch):
    """Its process may keep the store, and the others still ask it whether all leave."""
    monkeypatch.setattr(agreement, "POLL_S", 0.3)
    left = {}

    def work(meeting):
        if meeting.rank:
            time.sleep(0.1)  # rank 0 sees at once that it came, this one sees the rest a poll later
        try:
            meeting.agree({"a": meeting.rank})
        finally:
            left[meeting.rank] = time.monotonic()

    meet(3, work)
    assert left[0] == max(left.values())


def test_a_rank_that_fails_takes_the_others_along_with_its_problem():
    def work(meeting):
        with meeting.telling():
            meeting.agree(SETTINGS)
            if meeting.rank == 1:
                raise ValueError("model-2.safetensors is cut short")
            meeting.reached("loaded")

    start = time.monotonic()
    errors = meet(3, work)
    assert time.monotonic() - start < 4, "nobody waits out the goodbye"
    assert [str(error) for error in errors] == [
        "rank 1 ended: model-2.safetensors is cut short",
        "model-2.safetensors is cut short",
        "rank 1 ended: model-2.safetensors is cut short",
    ]
    assert type(errors[1]) is ValueError


def test_a_rank_that_still_loads_hears_it(monkeypatch):
    monkeypatch.setattr(agreement, "PROGRESS_S", 0.05)

    def work(meeting):
        with meeting.telling():
            if meeting.rank == 1:
                raise RuntimeError("no memory")
            for done in range(10_000):
                meeting.progress(done, 10_000)
                time.sleep(0.01)
            raise AssertionError("it loaded to the end")

    told, _ = meet(2, work)
    assert str(told) == "rank 1 ended: RuntimeError: no memory"


@pytest.mark.slow
def test_progress_is_that_of_the_slowest_and_keeps_patience(monkeypatch):
    monkeypatch.setattr(agreement, "PROGRESS_S", 0.0)

    def work(meeting):
        shown = []
        for done in range(1, 11):
            shown.append(meeting.progress(done, 10))
            time.sleep(0.15 if meeting.rank else 0.0)  # ten of these are longer than the patience
        meeting.reached("loaded")
        return shown, meeting.progress(10, 10)

    (shown, last), _ = meet(2, work, patience_s=1.0)
    assert shown[-1][0] < 10
    assert last == (10, 10)


def test_a_store_that_goes_ends_who_waits():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, 2)
    timer = threading.Timer(0.5, lambda: gone.clear())
    gone = [server]
    del server
    timer.start()
    with pytest.raises(Apart, match="the store in which the ranks meet is gone"):
        meeting.reached("loaded")


def test_ranks_are_named_by_runs():
    assert named([3]) == "rank 3"
    assert named([0, 7, 2, 3, 4]) == "ranks 0, 2-4, 7"

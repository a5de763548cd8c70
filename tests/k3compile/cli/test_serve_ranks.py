"""Several ranks as processes: they answer as one, refuse together, and end together without a trace."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import httpx
import pytest
import torch.distributed as dist
from k3compile.passes.remarks import Remark
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.parallel import beats
from k3compile.runtime.parallel.agreement import Apart, Disagreement, Meeting
from k3compile.runtime.parallel.folders import RANGES, places
from k3compile.runtime.server.server_config import ServerConfig
from served_ranks import ServedRanks, descendants, free_port, running

from k3compile.cli import serve_ranks
from k3compile.cli.door import Asked
from k3compile.cli.loading import Weights
from k3compile.cli.serve_ranks import (
    DRAIN_S,
    Rank,
    check_shares,
    follow_rank_0,
    in_time,
    lead_ranks,
    ready,
)
from k3compile.serving import plan

PROMPT = {"prompt": "The capital of France is", "temperature": 0, "ignore_eos": True}
ALONE = ["--no-compile", "--num-drafts", "0"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "k3-tiny", "tiny", 0)


def asked(checkpoint, ranks, context_ranks=1, **engine):
    serving = plan(EngineConfig(**engine), ranks=ranks, context_ranks=context_ranks)
    return Asked(checkpoint, serving, ServerConfig(), "float32", None, False)


def test_a_model_that_ranks_cannot_divide_is_refused_with_every_reason(tiny):
    check_shares(asked(tiny, 8, 2))
    with pytest.raises(ValueError, match="3 ranks cannot share this model") as told:
        check_shares(asked(tiny, 3))
    assert "num_attention_heads is 8" in str(told.value)
    assert "vocab_size is 1024" in str(told.value)
    with pytest.raises(ValueError, match="page_size is 6, and must be a multiple of dcp 4"):
        check_shares(asked(tiny, 4, 4, page_size=6))


def test_a_drain_ends_before_torchrun_gives_up(caplog):
    assert in_time(ServerConfig()).drain_s == DRAIN_S
    assert in_time(ServerConfig(drain_s=3.0)).drain_s == 3.0
    assert not caplog.messages
    assert in_time(ServerConfig(drain_s=60.0)).drain_s == 60.0
    assert "--shutdown-timeout 66 or more" in caplog.messages[0]


class Made:
    """Of an executor whose layers have so many pages, with one op that ``provider`` computes."""

    exports = False

    def __init__(self, pages, provider="native"):
        import torch

        self.pools = [[torch.empty(pages, 4)], [torch.empty(3), None]]
        said = Remark("lower", "applied", "n", "k3.linear_bf16", f"computed by {provider}")
        self.forward = SimpleNamespace(reports=[SimpleNamespace(remarks=[said])])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Made(5), None),
        (
            Made(6),
            'pools of layer.0: ["[5, 4] torch.float32"] on rank 0 and ["[6, 4] torch.float32"] on rank 1',
        ),
        (
            Made(5, "its meaning"),
            'computed.k3.linear_bf16: ["computed by native"] on rank 0 and '
            '["computed by its meaning"] on rank 1',
        ),
    ],
    ids=["the same", "pools", "implementation"],
)
def test_pools_of_another_size_and_other_implementations_are_refused(other, difference):
    store, told, made = dist.HashStore(), [], [Made(5), other]

    def work(rank):
        try:
            ready(Meeting(store, rank, 2), made[rank])
        except Apart as error:
            told.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [type(error) for error in told] == ([] if difference is None else [Disagreement] * 2)
    for error in told:
        assert error.differences == [difference]


class Watched:
    """A watch and a meeting that write down what they are told."""

    rank, store = 1, None

    def __init__(self):
        self.told, self.on_trouble = [], lambda tell: self.told.append(tell)
        self.report, self.step, self.telling = self.told.append, lambda kind: nullcontext(), nullcontext


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """One that has loaded nothing and whose ``leave`` can be seen."""
    monkeypatch.setattr(serve_ranks, "ready", lambda meeting, executor: None)
    monkeypatch.setattr(serve_ranks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(serve_ranks, "leave", sys.exit)
    return Rank(asked(tmp_path, 2), (seen := Watched()), seen, None, Weights(None, None, None))


def test_a_rank_that_cannot_follow_ends_all(rank, monkeypatch):
    def follow(*of):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(serve_ranks, "make_follower", lambda *of: None)
    monkeypatch.setattr(serve_ranks, "follow", follow)
    with pytest.raises(SystemExit) as end:
        follow_rank_0(rank)
    assert end.value.code == 1
    assert rank.watch.told == ["rank 1 cannot follow: RuntimeError: connection closed by peer"]


def test_a_rank_that_cannot_compile_ends_all_and_a_wrong_setting_is_the_users(rank, monkeypatch):
    def failing(error):
        def make(*of, **more):
            raise error

        monkeypatch.setattr(serve_ranks, "make_follower", make)
        monkeypatch.setattr(serve_ranks, "make_engine", make)

    failing(RuntimeError("no compiler"))
    for serve in (follow_rank_0, lambda rank: lead_ranks(rank, None)):
        with pytest.raises(SystemExit):
            serve(rank)
    assert rank.watch.told == ["rank 1 could not get ready: RuntimeError: no compiler"] * 2
    failing(ValueError("num_pages is too small"))
    with pytest.raises(ValueError, match="num_pages is too small"):
        follow_rank_0(rank)
    assert len(rank.watch.told) == 2


def test_an_interrupt_while_starting_is_told_in_both_places(monkeypatch, caplog):
    """Who waits in the meeting looks there; who loads or compiles hears it from the watch."""
    store, ended = dist.HashStore(), []
    dist.PrefixStore("watch", store).set(beats.TROUBLE, beats.QUIET)
    monkeypatch.setattr(serve_ranks, "leave", ended.append)
    monkeypatch.setattr(serve_ranks, "INTERRUPTED_S", 0.2)
    with serve_ranks.starting(Meeting(store, 1, 2)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
    assert ended == [130, 130], "and a timer would have, had the store not answered"
    assert caplog.messages == ["rank 1 was interrupted"]
    assert dist.PrefixStore("watch", store).get(beats.TROUBLE) == b"rank 1 was interrupted"
    with pytest.raises(Apart, match="rank 1 ended: it was interrupted"):
        Meeting(store, 0, 2).reached("loaded")


@pytest.mark.slow
def test_without_compilation_the_compilers_cache_folder_is_not_needed():
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/proc/none"}
    script = """
        from types import SimpleNamespace as Asked
        from k3compile.cli.serve_ranks import compile_of
        assert compile_of(Asked(compiled=False)) is None
        try:
            compile_of(Asked(compiled=True))
        except ValueError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout.startswith("cannot compile: the compiler's cache /proc/none: No such file"), (
        done.stderr
    )
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written, or serve with --no" in done.stdout


def test_whatever_ends_the_server_the_engine_lets_the_ranks_go(rank, monkeypatch):
    class Engine:
        fail, stopped = "tells the requests", False

        def stop(self):
            self.stopped = True

    def answer(*of):
        raise OSError("no more sockets")

    engine = Engine()
    monkeypatch.setattr(serve_ranks, "make_engine", lambda *of, lead: engine)
    monkeypatch.setattr(serve_ranks, "answer", answer)
    with pytest.raises(OSError, match="no more sockets"):
        lead_ranks(rank, None)
    assert engine.stopped
    assert rank.watch.told == ["tells the requests"]


def ask(url, **more):
    answer = httpx.post(f"{url}/completions", json={**PROMPT, **more}, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def chunks(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def refuses(url):
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


@pytest.mark.tp
def test_two_ranks_answer_stream_and_end_at_a_signal_to_rank_0(tiny):
    """Torchrun ends with 0, the port is closed, nothing is left running and nothing complains."""
    with ServedRanks(2, *ALONE, "--model", tiny, "--dcp", "2") as served:
        url = served.url()
        assert ask(url, max_tokens=6) == ask(url, max_tokens=6)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=100) as response:
            *_, last = chunks(response.iter_lines())
        assert last["choices"][0]["finish_reason"] == "length"
        started = [served.processes[0].pid, *descendants(served.processes[0].pid)]
        assert len(started) >= 3
        os.kill(served.ranks()[0], signal.SIGTERM)
        assert served.wait() == [0], served.text
    assert refuses(url)
    assert not [pid for pid in started if running(pid)]
    assert "2 ranks share every layer, 2 the latents of a token" in served.text
    for word in ("Traceback", "ERROR", "[rank 1]", "WARNING k3compile"):
        assert word not in served.text, served.text


@pytest.mark.tp
def test_a_signal_to_all_ranks_lets_a_running_answer_finish(tiny):
    """As torchrun passes one on: the other ranks must not die of it before rank 0 is through. Without a
    launcher rank 0 keeps the store.
    """
    with ServedRanks(2, *ALONE, "--model", tiny, by_hand=True) as served:
        url = served.url()
        body = {**PROMPT, "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=100) as response:
            lines = response.iter_lines()
            next(lines)
            for pid in served.ranks():
                os.kill(pid, signal.SIGTERM)
            rest = chunks(lines)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert served.wait() == [0, 0], served.text
    assert refuses(url)
    assert "Traceback" not in served.text
    assert "ERROR" not in served.text


@pytest.mark.tp
def test_several_ranks_compile_before_the_port_answers(tiny):
    port = free_port()
    more = ["--num-drafts", "0", "--inner", "eager", "--port", port]
    with ServedRanks(2, *more, "--model", tiny, by_hand=True) as served:
        served.wait_until(lambda: "compiling before the port answers" in served.text, "it compiles")
        assert refuses(f"http://127.0.0.1:{port}/v1")
        url = served.url()
        assert "compiled: 4 graphs" in served.text.partition(" serves ")[0]
        assert len(ask(url, max_tokens=4)) > 0
        os.kill(served.ranks()[0], signal.SIGINT)
        assert served.wait() == [0, 0], served.text


@pytest.mark.tp
def test_an_interrupt_while_compiling_ends_all_ranks_within_seconds(tiny):
    more = ["--num-drafts", "0", "--inner", "eager", "--load-deadline-s", "100"]
    with ServedRanks(2, *more, "--model", tiny, by_hand=True) as served:
        served.wait_until(lambda: "compiling before the port answers" in served.text, "it compiles")
        start = time.monotonic()
        for pid in served.ranks():
            os.kill(pid, signal.SIGINT)
        assert served.wait() == [130, 130], served.text
        assert time.monotonic() - start < 10
    for rank in (0, 1):
        assert served.errors(rank).count(f"rank {rank} was interrupted") == 1
    for word in ("Traceback", "ERROR", "frame #"):
        assert word not in served.text, served.text


@pytest.mark.tp
def test_sigint_to_torchrun_ends_an_open_stream_with_an_event(tiny):
    with ServedRanks(2, *ALONE, tiny) as served:
        url = served.url()
        started = descendants(served.processes[0].pid)
        body = {**PROMPT, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=100) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            served.processes[0].send_signal(signal.SIGINT)
            rest = chunks(lines)
        assert rest[-1]["error"]["message"] == "the server is stopping"
        served.wait()  # torchrun tells of its own signal in its own way: code 1 and a traceback of itself
        assert time.monotonic() - start < 25
    assert not [pid for pid in started if running(pid)]
    for word in ("exitcode", "SIGKILL", "ERROR k3compile", "[rank 1]"):
        assert word not in served.text, served.text


@pytest.mark.tp
def test_ranks_that_were_started_differently_all_end_with_every_difference(tiny):
    own = {1: ["--max-num-batched-tokens", "1024", "--dtype", "bfloat16"]}
    with ServedRanks(2, *ALONE, tiny, by_hand=True, own=own) as served:
        assert served.wait() == [2, 2]
    for rank in (0, 1):
        told = served.errors(rank)
        mark = "rank 1: " if rank else ""
        assert f"error: {mark}the ranks differ: " in told
        assert "engine.max_num_batched_tokens: 2048 on rank 0 and 1024 on rank 1" in told
        assert 'dtype: "float32" on rank 0 and "bfloat16" on rank 1; ' in told
        assert "Traceback" not in told
    assert "loaded" not in served.text


@pytest.mark.tp
def test_a_rank_that_cannot_load_ends_all_with_its_problem(tiny, tmp_path):
    """Same names, sizes, headers and samples; but what rank 1 would read holds no numbers."""
    broken = shutil.copytree(tiny, tmp_path / "broken")
    for file in broken.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        sampled = [(p + start, p + start + n) for p, n in places(len(raw) - start, RANGES)]
        for (_, begin), (end, _) in pairwise(sampled):
            raw[begin:end] = b"\xff" * (end - begin)
        file.write_bytes(raw)
    own = {0: ["--model", tiny], 1: ["--model", broken]}
    with ServedRanks(2, *ALONE, by_hand=True, own=own) as served:
        assert served.wait() == [2, 2]
    assert f"error: rank 1 ended: cannot load {broken}: " in served.errors(0)
    assert f"error: rank 1: cannot load {broken}: " in served.errors(1)
    assert "holds NaN or infinity" in served.errors(0)
    assert "Traceback" not in served.text

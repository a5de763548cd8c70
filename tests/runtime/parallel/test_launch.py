"""What torchrun says is read once, and whoever was started wrongly is told the command that is right."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from k3compile.runtime.parallel.agreement import Apart
from k3compile.runtime.parallel.launch import Seat, check, deaf, device_of, meet, on_interrupt, seat

TOLD = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
HERE = Seat(3, 8, 1, "127.0.0.1", 29511, False, 0)


def test_no_launcher_means_no_seat():
    assert seat({}) is None
    assert seat({"MASTER_ADDR": "x", "OMP_NUM_THREADS": "1"}) is None


def test_a_seat_is_what_the_launcher_says():
    assert seat(TOLD) == HERE
    assert seat(TOLD | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2
    assert seat(TOLD | {"RANK": "0"}).keeps, "nobody else keeps the store"
    assert not seat(TOLD | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).keeps


def test_half_an_environment_is_told():
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set beside"):
        seat({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match=r"no number where one is needed: .*'three'"):
        seat(TOLD | {"RANK": "three"})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE 8; allowed: a RANK of 0 to"),
        ({"RANK": "-1"}, "RANK is -1 and WORLD_SIZE 8"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; allowed: 0 or more"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0; allowed: 1 to 65535"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999; allowed: 1 to 65535"),
    ],
)
def test_numbers_that_nobody_would_wait_for_with_success_are_refused_at_once(wrong, told):
    with pytest.raises(ValueError, match=told):
        seat(TOLD | wrong)


def test_another_number_of_processes_is_refused_with_the_command_that_is_right():
    arguments = ["examples/serve.py", "--tp", "4", "--model", "my model"]
    check(None, 1, arguments)
    check(HERE, 8, arguments)
    with pytest.raises(ValueError, match="tp is 0: give the number of ranks"):
        check(None, 0, arguments)
    with pytest.raises(ValueError) as told:
        check(None, 4, arguments)
    assert str(told.value) == (
        "tp is 4, and this is one process. Start 4 of them:\n"
        "torchrun --standalone --nproc-per-node 4 examples/serve.py --tp 4 --model 'my model'"
    )
    with pytest.raises(ValueError, match="tp is 4, but the launcher started 8 processes: give --tp 8, or st"):
        check(HERE, 4, arguments)
    with pytest.raises(ValueError, match="tp is 1, but the launcher started 8 processes"):
        check(HERE, 1, arguments)


def test_a_store_that_nobody_keeps_is_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Apart, match=f"there is no store at 127.0.0.1:{port}"):
        meet(HERE._replace(port=port), patience_s=1.0)


def test_attempts_do_not_read_each_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = meet(Seat(0, 1, 0, "127.0.0.1", port, True, 0))
    first.agree({"a": 1})
    again = meet(Seat(0, 1, 0, "127.0.0.1", port, False, 1))  # takes the same seat again
    assert not again._has("settings/0")
    assert first._has("settings/0")


def test_a_seat_is_taken_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = meet(Seat(0, 2, 0, "127.0.0.1", port, True, 0))
    second = meet(Seat(1, 2, 1, "127.0.0.1", port, False, 0))
    here = f"process {os.getpid()} on {socket.gethostname()}"
    told = f"RANK 1: {here}, which was first, and {here}, which ends; give each its own, 0 to 1, and start"
    with pytest.raises(Apart, match=told):
        meet(Seat(1, 2, 2, "127.0.0.1", port, False, 0))
    thread = threading.Thread(target=second.reached, args=("settings",))
    thread.start()
    first.reached("settings")  # those that were first go on
    thread.join(10)
    assert not thread.is_alive()


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    assert device_of(HERE) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(HERE, "cuda") == torch.device("cuda:1")
    assert device_of(None, "cuda") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="LOCAL_RANK is 2, and this machine has 2 GPUs: each rank needs"):
        device_of(HERE._replace(local=2), "cuda")


def test_the_signals_of_a_launcher_do_nothing_for_a_while():
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    before = [signal.getsignal(sig) for sig in signals]
    with deaf():
        for sig in signals:
            os.kill(os.getpid(), sig)
        time.sleep(0.05)
    assert [signal.getsignal(sig) for sig in signals] == before


def test_an_interrupt_ends_and_a_second_one_is_not_heard():
    before, called = signal.getsignal(signal.SIGINT), []

    def end():
        called.append("end")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.4)

    with on_interrupt(end, lambda: called.append("give up"), 0.1):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.6)
    assert called == ["end", "give up"]
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_is_heard_while_the_main_thread_is_deep_in_something_else():
    called: list[float] = []
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with on_interrupt(lambda: called.append(time.monotonic()), lambda: None, 60.0):
        hashlib.pbkdf2_hmac("sha256", b"one call", b"that looks at no signal", 1_500_000)
        back = time.monotonic()
    assert called[0] < back - 0.2


RANK = """
    import json, sys
    import torch
    import torch.distributed as dist
    from k3compile.runtime.parallel.collectives import all_reduce
    from k3compile.runtime.parallel.launch import device_of, join, meet, seat
    here = seat()
    meeting = meet(here)
    setting = int(sys.argv[1]) if here.rank == 1 else 0
    try:
        meeting.agree({"setting": setting, "pid": None})
    except ValueError as error:
        print(json.dumps([here.rank, dist.is_initialized(), str(error)]), flush=True)
        sys.exit(2)
    ranks = join(here, meeting, device_of(here), 2)
    total = all_reduce(torch.tensor([1.0 + ranks.rank]), ranks.group)
    print(json.dumps([list(ranks), total.item()]), flush=True)
    dist.destroy_process_group()
"""


def torchrun(tmp_path, *arguments):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, script, *arguments], capture_output=True, text=True, timeout=120)
    return done, sorted(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.tp
def test_ranks_that_agree_join_and_sum(tmp_path):
    done, said = torchrun(tmp_path, "0")
    assert done.returncode == 0, done.stderr
    (first, total), (second, same) = said
    assert total == same == 3.0
    assert first[:2] == [0, 2]
    assert second[:2] == [1, 2]
    assert first[3:] == [2, first[2]], "a context group of all ranks is the group of all ranks"


@pytest.mark.tp
def test_ranks_that_differ_end_with_one_error_and_without_a_process_group(tmp_path):
    done, said = torchrun(tmp_path, "5")
    assert done.returncode != 0
    told = "the ranks differ:\n  setting: 0 on rank 0 and 5 on rank 1"
    assert said == [[0, False, told], [1, False, told]]

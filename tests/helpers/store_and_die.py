"""Starts processes that write into a disk tier, and treats them badly. Prints what it saw as JSON.

store_and_die.py kill FOLDER ROUNDS SEED     two writers, kill -9 at random; after each, serve from there
store_and_die.py serve FOLDER ROUNDS SEED    kill -9 an engine that serves; after each, another one serves
store_and_die.py refuse FOLDER               write without the right to, and beyond a limit of file size
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # where the toy model is

import torch
from k3compile.runtime.cache.tiers.disk import DiskTier
from k3compile.runtime.cache.tiers.entry import Declined, Key
from k3compile.runtime.request import Request
from tier_entries import FINGERPRINT, chain, entry_of, same

VALUES = 30_000
CAPACITY = 3_000_000  # two dozen entries: most puts delete as well
CHAINS = [chain(20, name) for name in "abc"]
UNIVERSE = [pair for hashes in CHAINS for pair in zip(hashes, [None, *hashes])]  # hash, parent


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def tier(folder: str) -> DiskTier:
    return DiskTier(folder, CAPACITY, FINGERPRINT, 4 * VALUES + 100)


def store_for_ever(folder: str, seed: int) -> None:
    rng, disk = random.Random(seed), tier(folder)
    while True:
        hash, parent = rng.choice(UNIVERSE)
        key = Key(hash, rng.choice(["pages", "state"]))
        if key in disk:
            try:
                disk.get(key)
            except Declined as error:
                if error.reason != "not_found":  # the other writer needed the room
                    raise
        else:
            disk.put(key, entry_of(key, VALUES), parent)


def in_a_child(work) -> int:
    """Fork, and never come back from the child."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def kill(folder: str, rounds: int, seed: int) -> dict:
    rng, seen = random.Random(seed), {"served": 0, "wrong": 0, "refused": 0, "parts": 0, "largest": 0}
    for i in range(rounds):
        pids = [in_a_child(lambda n=n: store_for_ever(folder, seed * 1000 + n)) for n in (2 * i, 2 * i + 1)]
        for pid in pids:
            time.sleep(rng.uniform(0.02, 0.12))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the writer ended by itself: {status}"
        parts = list(Path(folder).glob(".*.part"))
        seen["parts"] += bool(parts)
        disk = tier(folder)
        assert not list(Path(folder).glob(".*.part")), "half a file of a dead writer stays"
        seen["largest"] = max(seen["largest"], sum(p.stat().st_size for p in Path(folder).iterdir()))
        for hash, _ in UNIVERSE:
            for key in (Key(hash, "pages"), Key(hash, "state")):
                if key not in disk:
                    continue
                try:
                    entry, _ = disk.get(key)
                except Declined:
                    seen["refused"] += 1
                    continue
                seen["served"] += 1
                seen["wrong"] += not same(entry, entry_of(key, VALUES))
    return seen


def serve_until(folder: str, prompts: list[list[int]], rounds: int | None) -> tuple[int, int]:
    """Serve prompts from a toy engine over the folder -> wrong answers, tokens that were not run."""
    conftest = import_module("conftest")
    sizes = {"num_pages": 64, "block_size": 8, "prefix_match_unit": 4, "num_checkpoints": 12}
    engine = conftest.toy_engine(prefix_cache=True, offload_dir=folder, **sizes)
    wrong = cached = turn = 0
    while rounds is None or turn < rounds:
        order = [f"{turn}-{i}" for i in range(len(prompts))]
        heard = conftest.run_all(engine, [Request(n, p, conftest.greedy(3)) for n, p in zip(order, prompts)])
        for name, prompt in zip(order, prompts):
            wrong += heard[name].tokens != conftest.continue_alone(prompt, 3)
            cached += heard[name].updates[-1].cached_tokens
        engine.cache.drop()
        turn += 1
        prompts = [*prompts[1:], [turn % 97, *prompts[0][1:]]] if rounds is None else prompts
    engine.stop()
    return wrong, cached


def serve(folder: str, rounds: int, seed: int) -> dict:
    rng, seen = random.Random(seed), {"wrong": 0, "cached": 0}
    prompts = [[rng.randrange(97) for _ in range(30)] for _ in range(6)]
    import_module("conftest")  # once, before the forks
    report = Path(folder).with_name("report")
    for _ in range(rounds):
        pid = in_a_child(lambda: serve_until(folder, prompts, None))
        time.sleep(rng.uniform(0.05, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, "the engine ended by itself"
        again = in_a_child(lambda: report.write_text(json.dumps(serve_until(folder, prompts, 1))))
        assert os.waitpid(again, 0)[1] == 0, "the next engine failed"
        wrong, cached = json.loads(report.read_text())
        seen["wrong"] += wrong
        seen["cached"] += cached
    return seen


def refuse(folder: str) -> dict:
    """What put says to a writer without rights and to one that may not write so much."""
    key = Key(UNIVERSE[0][0], "pages")
    with_one = tier(folder)
    with_one.put(key, entry_of(key, VALUES), None)
    os.chmod(Path(folder), 0o555)
    os.chmod(next(Path(folder).iterdir()), 0o444)
    report = Path(folder).parent / "report"
    report.mkdir(mode=0o777, exist_ok=True)
    os.chmod(report, 0o777)

    def attempt(name: str, before) -> str:
        def work() -> None:
            before()
            disk = tier(folder)
            try:
                disk.put(other := Key(UNIVERSE[1][0], "pages"), entry_of(other, VALUES), key.hash)
                said = "stored"
            except Declined as error:
                said = error.reason
            served = same(disk.get(key)[0], entry_of(key, VALUES))
            parts = len(list(Path(folder).glob(".*")))
            (report / name).write_text(f"{said} {served} {parts}")

        os.waitpid(in_a_child(work), 0)
        return (report / name).read_text()

    def nobody() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    said = {"without the right": attempt("right", nobody)}
    os.chmod(Path(folder), 0o755)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    return said | {"beyond the limit": attempt("limit", limit)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger().addHandler(warnings := Warnings())
    what, folder, *rest = sys.argv[1:]
    result = {"kill": kill, "serve": serve, "refuse": refuse}[what](folder, *map(int, rest))
    print(json.dumps({**result, "warnings": warnings.said}))

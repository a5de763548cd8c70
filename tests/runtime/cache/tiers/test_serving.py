"""Whole engines over tiers: whatever comes back from below, answers are those of requests served alone."""

import gc
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from k3compile.runtime.cache.tiers.disk_file import read_name
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.ngram import NgramDrafter

TESTS = Path(__file__).parents[3]
CACHED = {
    "prefix_cache": True,
    "block_size": 8,
    "prefix_match_unit": 4,
    "num_checkpoints": 6,
    "num_pages": 24,
}


def engine_of(toy, folder=None, host: int = 1 << 20, model=None, **settings):
    tiers = {"offload_host_bytes": host, "offload_dir": str(folder) if folder else None}
    return toy.engine(model, **{**CACHED, **tiers, **settings})


def ask(toy, engine, prompts: list[list[int]], max_tokens: int = 4, tag: str = "") -> list:
    """Serve prompts at once; every answer must be right -> what each was told last."""
    heard = toy.run(engine, [Request(f"{tag}{i}", p, toy.greedy(max_tokens)) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert heard[f"{tag}{i}"].error is None
        assert heard[f"{tag}{i}"].tokens == toy.alone(prompt, max_tokens)
    return [heard[f"{tag}{i}"].updates[-1] for i in range(len(prompts))]


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for _ in range(count)]


def forget(engine) -> None:
    """The device forgets all prefixes, once they are stored."""
    assert engine.tiers.drain(20)
    engine.cache.drop()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_forgotten_prompt_is_loaded_and_not_run_again(toy, tmp_path, tier):
    engine = engine_of(toy, tmp_path if tier == "disk" else None, 0 if tier == "disk" else 1 << 20)
    (prompt,) = prompts_of(1, 43)
    assert ask(toy, engine, [prompt])[0].cached_tokens == 0
    forget(engine)
    model_rows = engine.stats().rows
    assert ask(toy, engine, [prompt], tag="again")[0].cached_tokens == 40
    assert engine.stats().rows - model_rows == 3 + 3  # what the prefix leaves, and three more tokens
    stats = engine.stats().offload
    assert (stats.loads, stats.loaded_tokens, stats.load_declined) == ({"done": 1}, 40, {})
    assert ask(toy, engine, [prompt], tag="third")[0].cached_tokens == 40  # from the device now
    assert engine.stats().offload.loads == {"done": 1}
    engine.stop()


def test_a_restart_serves_from_the_folder(toy, tmp_path):
    prompts = prompts_of(3, 30)
    first = engine_of(toy, tmp_path, num_checkpoints=16, num_pages=64)  # nothing has to go
    ask(toy, first, prompts)
    first.stop()
    second = engine_of(toy, tmp_path, num_checkpoints=16, num_pages=64)
    assert [update.cached_tokens for update in ask(toy, second, prompts)] == [28, 28, 28]
    longer = [p + toy.alone(p, 4) + [5, 6, 7] for p in prompts]  # the next turn of each
    ask(toy, second, longer, tag="turn")
    assert second.stats().offload.loads.keys() == {"done"}
    second.stop()


def test_few_pages_and_many_conversations_come_back_in_turn(toy, tmp_path):
    engine = engine_of(toy, tmp_path, num_pages=20, host=20_000)
    talks = prompts_of(5, 21)
    for turn in range(4):
        for i, talk in enumerate(talks):
            ask(toy, engine, [talk], tag=f"{turn}-{i}-")
            talks[i] = talk + toy.alone(talk, 4) + [turn, i]
            assert engine.tiers.drain(20)
    stats = engine.stats()
    assert stats.offload.loads["done"] > 8
    assert stats.evicted_pages > 50
    assert stats.prefix_hit_tokens > 0.6 * stats.prefix_query_tokens
    engine.stop()


@pytest.mark.parametrize("harm", ["bit", "cut", "gone"])
def test_a_spoiled_folder_costs_time_and_changes_no_token(toy, tmp_path, harm):
    prompts = prompts_of(3, 30)
    first = engine_of(toy, tmp_path)
    ask(toy, first, prompts)
    first.stop()
    second = engine_of(toy, tmp_path, host=0)
    for path in list(tmp_path.iterdir())[::2]:
        assert read_name(path.name)
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.unlink() if harm == "gone" else path.write_bytes(data if harm == "bit" else data[:-1])
    ask(toy, second, prompts)
    stats = second.stats().offload
    assert stats.loads["failed"] > 0
    assert set(stats.load_declined) <= {{"bit": "checksum", "cut": "torn", "gone": "not_found"}[harm]}
    ask(toy, second, prompts, tag="again")
    second.stop()


def test_another_model_in_the_same_folder_gets_nothing(toy, tmp_path):
    (prompt,) = prompts_of(1, 30)
    first = engine_of(toy, tmp_path)
    ask(toy, first, [prompt])
    first.stop()
    model = toy.Model()
    model.config.max_position_embeddings = 2048  # another configuration
    second = engine_of(toy, tmp_path, model=model)
    assert ask(toy, second, [prompt])[0].cached_tokens == 0
    assert second.stats().offload.loads == {}
    second.stop()


class Held:
    """Keeps loads from arriving until opened."""

    def __init__(self, engine) -> None:
        self.opened = threading.Event()
        self.real = engine.tiers.offload._get
        engine.tiers.offload._get = self

    def __call__(self, *arguments):
        assert self.opened.wait(30)
        return self.real(*arguments)


def loading_engine(toy, prompt, **settings):
    """An engine that has just begun to load ``prompt`` for a request "r" -> engine, gate, listener."""
    engine = engine_of(toy, **settings)
    ask(toy, engine, [prompt])
    forget(engine)
    gate, listener = Held(engine), toy.Listener()
    engine.submit(Request("r", prompt, toy.greedy(4)), listener)
    engine.step()
    assert [r.id for r in engine.scheduler.loading] == ["r"]
    return engine, gate, listener


def finish(engine) -> None:
    while engine.step():
        pass


def test_others_are_served_while_a_request_loads(toy):
    prompt, other = prompts_of(2, 43)
    engine, gate, listener = loading_engine(toy, prompt)
    heard = toy.Listener()
    engine.submit(Request("other", other, toy.greedy(4)), heard)
    for _ in range(30):
        engine.step()
    assert heard.tokens == toy.alone(other, 4)
    assert listener.tokens == []
    engine.cache.check()
    gate.opened.set()
    finish(engine)
    assert listener.tokens == toy.alone(prompt, 4)
    assert listener.updates[-1].cached_tokens == 40
    assert engine.tiers.drain(20)
    toy.assert_nothing_left(engine)
    engine.stop()


def test_a_request_that_is_aborted_while_it_loads_gives_everything_back(toy):
    (prompt,) = prompts_of(1, 43)
    engine, gate, listener = loading_engine(toy, prompt)
    engine.abort("r")
    engine.step()
    assert listener.finish == "abort"
    assert engine.scheduler.idle
    assert engine.tiers.drain(20)
    toy.assert_nothing_left(engine)
    gate.opened.set()
    ask(toy, engine, [prompt], tag="next")
    assert engine.stats().offload.loads == {"cancelled": 1, "done": 1}
    engine.stop()


def test_a_request_that_loads_yields_its_pages_to_an_older_one_and_loads_again(toy):
    prompt, old = prompts_of(2, 35)
    engine = engine_of(toy, num_pages=17)
    ask(toy, engine, [prompt])
    forget(engine)
    gate, heard, listener = Held(engine), toy.Listener(), toy.Listener()
    engine.submit(Request("old", old[:20], toy.greedy(20)), heard)
    engine.step()
    engine.submit(Request("r", prompt, toy.greedy(4)), listener)
    for _ in range(60):
        engine.step()
    assert len(heard.tokens) > 4
    gate.opened.set()
    finish(engine)
    assert heard.tokens == toy.alone(old[:20], 20)
    assert listener.tokens == toy.alone(prompt, 4)
    assert engine.scheduler.preemptions > 0
    assert engine.tiers.drain(20)
    toy.assert_nothing_left(engine)
    engine.stop()


def test_a_load_that_hangs_ends_in_a_run_of_the_prompt(toy):
    (prompt,) = prompts_of(1, 43)
    engine, gate, listener = loading_engine(toy, prompt)
    engine.tiers.offload._timeout_s = 0.2
    finish(engine)
    assert listener.tokens == toy.alone(prompt, 4)
    assert listener.updates[-1].cached_tokens == 0
    assert engine.stats().offload.load_declined == {"timeout": 1}
    gate.opened.set()
    engine.stop()


def test_an_engine_thread_wakes_for_a_load_and_stops_in_time_with_one_under_way(toy):
    (prompt,) = prompts_of(1, 43)
    engine, gate, listener = loading_engine(toy, prompt)
    engine.start()
    time.sleep(0.1)
    gate.opened.set()
    deadline = time.monotonic() + 20
    while listener.finish is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert listener.tokens == toy.alone(prompt, 4)
    engine.stop()
    offload = engine.tiers.offload
    assert not any(w.alive for w in (offload._storer, offload._writer, offload._loader))


def test_an_idle_engine_goes_on_storing_and_keeps_nothing_back(toy):
    (prompt,) = prompts_of(1, 43)
    engine, listener = engine_of(toy), toy.Listener()
    engine.submit(Request("r", prompt, toy.greedy(2)), listener)
    engine.start()
    deadline = time.monotonic() + 20
    while listener.finish is None or engine.tiers.busy:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert engine.stats().offload.stored["host"] >= 13
    engine.stop()


def test_stopping_with_a_load_under_way_tells_the_client(toy):
    (prompt,) = prompts_of(1, 43)
    engine, gate, listener = loading_engine(toy, prompt)
    engine.start()
    threading.Timer(0.3, gate.opened.set).start()
    engine.stop()
    assert listener.finish in ("abort", "length")


def test_what_was_published_is_stored_before_the_engine_is_gone(toy, tmp_path):
    (prompt,) = prompts_of(1, 43)
    engine = engine_of(toy, tmp_path, host=0)
    ask(toy, engine, [prompt])
    engine.stop()
    again = engine_of(toy, tmp_path, host=0)
    assert ask(toy, again, [prompt])[0].cached_tokens == 40
    again.stop()


def test_an_engine_that_is_dropped_takes_its_threads_along(toy):
    engine = engine_of(toy)
    (prompt,) = prompts_of(1, 43)
    ask(toy, engine, [prompt])
    workers = [engine.tiers.offload._storer, engine.tiers.offload._writer, engine.tiers.offload._loader]
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while any(worker.alive for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


SCRIPT = """
import sys, random
sys.path[:0] = {paths!r}
from conftest import toy_engine, greedy, ToyModel
from k3compile.runtime.request import Request
engine = toy_engine(page_size=4, prefix_cache=True, block_size=8, prefix_match_unit=4, num_checkpoints=6,
                    num_pages=64, offload_dir={folder!r})
engine.submit(Request("r", {prompt!r}, greedy(2)), lambda update: None)
while engine.step():
    pass
"""


@pytest.mark.slow
def test_a_program_that_ends_without_stopping_its_engine_has_stored_what_it_ran(toy, tmp_path):
    (prompt,) = prompts_of(1, 43)
    paths = [str(TESTS / "runtime"), str(TESTS / "helpers")]
    script = SCRIPT.format(paths=paths, folder=str(tmp_path / "tier"), prompt=prompt)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    again = engine_of(toy, tmp_path / "tier", num_pages=64)
    assert ask(toy, again, [prompt])[0].cached_tokens == 40
    again.stop()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_random_traffic_over_small_tiers(toy, tmp_path, seed):
    """Conversations, tenants, drafts, aborts, preemptions and restarts over tiers that forget and fail."""
    rng = random.Random(seed)
    drafts = rng.choice([0, 3])
    room = {"host": rng.choice([0, 600, 5000]), "offload_disk_bytes": rng.choice([12_000, 40_000])}
    talks = [(rng.choice(["", "tenant"]), p[:9] + p[:8]) for p in prompts_of(6, 9, seed)]
    counted = 0
    for life in range(3):
        how = {"exports": rng.random() < 0.5, "drafter": NgramDrafter(drafts) if drafts else None}
        how |= {"num_pages": rng.choice([20, 40]), "num_drafts": drafts, "state_replay": rng.random() < 0.7}
        engine = engine_of(toy, tmp_path, **how, **room)
        disk_get, heard = engine.tiers.offload.disk.get, {}

        def get(key, disk_get=disk_get):
            if rng.random() < 0.02:
                raise ZeroDivisionError("a mistake of ours")
            return disk_get(key)

        engine.tiers.offload.disk.get = get
        for n in range(14):
            salt, talk = rng.choice(talks)
            name, length = f"{life}-{n}", rng.randrange(1, 7)
            heard[name] = (toy.Listener(), talk, length)
            request = Request(name, talk, toy.greedy(length), cache_salt=salt)
            engine.submit(request, heard[name][0])
            if len(talk) < 40 and rng.random() < 0.5:
                talks[talks.index((salt, talk))] = (salt, talk + toy.alone(talk, 3) + [n])
            if rng.random() < 0.3:
                forget(engine)
            for _ in range(rng.randrange(12)):
                engine.step()
                if rng.random() < 0.05 and engine.scheduler.running:
                    engine.scheduler.preempt(rng.choice(engine.scheduler.running))
                if rng.random() < 0.05:
                    engine.abort(rng.choice(list(heard)))
                engine.cache.check()
        finish(engine)
        engine.stop()
        toy.assert_nothing_left(engine)
        for listener, talk, length in heard.values():
            alone = toy.alone(talk, length)
            assert listener.error is None
            assert listener.tokens == alone[: len(listener.tokens)]
            assert listener.finish == "abort" or listener.tokens == alone
        counted += engine.stats().offload.loads.get("done", 0)
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= room["offload_disk_bytes"]
    assert counted > 0


def test_greedy_answers_of_a_model_in_float64_survive_a_round_trip_and_a_restart(tmp_path):
    from small_models import SMALL, small_model

    model = small_model(SMALL)
    rng = random.Random(0)
    shared = [rng.randrange(90) for _ in range(64)]
    prompts = [shared + [rng.randrange(90) for _ in range(n)] for n in (1, 30, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def serve(engine, tag: str) -> dict[str, tuple[list[int], int]]:
        got: dict[str, tuple[list[int], int]] = {}

        def listen(update) -> None:
            assert update.error is None
            tokens, _ = got.get(update.request_id, ([], 0))
            got[update.request_id] = (tokens + update.tokens, update.cached_tokens)

        for i, prompt in enumerate(prompts):
            engine.submit(Request(f"{tag}{i}", prompt, params), listen)
        while engine.step():
            pass
        return [got[f"{tag}{i}"] for i in range(len(prompts))]

    settings = {"page_size": 16, "max_model_len": 256, "poison": True, "max_num_seqs": 4}
    alone = [tokens for tokens, _ in serve(make_engine(model, EngineConfig(**settings)), "a")]
    settings |= {
        "prefix_cache": True,
        "block_size": 64,
        "prefix_match_unit": 32,
        "offload_dir": str(tmp_path),
    }
    first = make_engine(model, EngineConfig(**settings, offload_host_bytes=1 << 24))
    assert [tokens for tokens, _ in serve(first, "b")] == alone
    forget(first)
    assert serve(first, "c") == [(alone[0], 64), (alone[1], 64), (alone[2], 128)]
    assert first.stats().offload.loads["done"] == 3
    first.stop()
    second = make_engine(model, EngineConfig(**settings))
    assert serve(second, "d") == [(alone[0], 64), (alone[1], 64), (alone[2], 128)]
    second.stop()

"""A toy model whose every token depends on the whole state, window and pages of its request, exactly.

    state   <- (31 * state + 7 * token + 3) mod P                one number a slot
    latent  =  (5 * state + position) mod P                      one number a token, in the pages
    hidden  =  state + 3, 5, 7 * (last three tokens) + sum of (j + 1) * latent_j    mod P

All in float64 on whole numbers below 2**53, so nothing is rounded and NaN shows up wherever something freed
is read. A verify row leaves its slot alone and records what :func:`settle` needs, or writes its states to
scratch slots where pools have no records. With ``exports`` the forward obeys a step's export columns, as a
compiled one does.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.speculation import Speculation

P = 2**25 - 39
VOCAB = 97


def scores(hidden: np.ndarray) -> np.ndarray:
    """[N, VOCAB] in [0, 4) from [N] hidden numbers."""
    i = np.arange(VOCAB, dtype=np.float64)
    return (hidden[:, None] * (2 * i + 1) * 7919 + i * i * 104729) % P / P * 4


class ToyModel:
    """Stands for the model in tests of the scheduler, the cache and the engine."""

    def __init__(self, eos: tuple[int, ...] = ()) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=eos, max_position_embeddings=4096)
        self.steps: list[list[int]] = []  # rows of each request of each step
        self.fail_next: Exception | None = None

    def make_pools(
        self, num_slots: int, num_pages: int, page_size: int, max_drafts: int, record_slots: int | None = None
    ):
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        j, kept = max_drafts + 1, num_slots if record_slots is None else record_slots
        kda = KdaPools(
            zeros(num_slots, 1, 1, 1),
            zeros(num_slots, 3, 1),
            zeros(kept, j, 1, 1),
            zeros(kept, j, 1, 1),
            zeros(kept, j, 1, 1),
            zeros(kept, j, 1),
        )
        return [kda, MlaPools(zeros(num_pages, page_size, 1))]

    def forward(self, step, pools, exports=False):
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        kda, mla = pools
        state, window, pages = kda.state.numpy(), kda.window.numpy(), mla.pages.numpy()
        page_size = pages.shape[1]
        counts = [*np.diff(step.cu_verify.numpy()), *np.diff(step.cu_other.numpy())]
        num_verify = len(step.cu_verify) - 1
        assert sum(counts) == len(step.tokens) == int(step.spans.sum())
        self.steps.append([int(c) for c in counts])
        tokens, hidden, at = step.tokens.numpy(), np.empty(len(step.tokens)), 0
        for r, count in enumerate(counts):
            slot, seen, table = int(step.slots[r]), int(step.seen[r]), step.pages[r].numpy()
            assert slot > 0
            s, last = float(state[slot, 0, 0, 0]), window[slot, :, 0].tolist()
            states, windows, offset = (
                [],
                [],
                int(step.export_offset[r - num_verify]) if r >= num_verify else 0,
            )
            for token in tokens[at : at + count].tolist():
                s, last = (31 * s + 7 * token + 3) % P, [*last[1:], float(token)]
                states.append(s)
                windows.append(3 * last[0] + 5 * last[1] + 7 * last[2])
                if exports and len(states) == offset:
                    place = int(step.export_slot[r - num_verify])
                    state[place], window[place, :, 0] = s, last
            assert offset <= count
            if r < num_verify and len(kda.rec_u):
                kda.rec_u[slot, :count, 0, 0] = torch.tensor(states, dtype=torch.float64)
                kda.rec_x[slot, :count, 0] = step.tokens[at : at + count].double()
            elif r < num_verify:
                raw = [*window[slot, :, 0].tolist(), *tokens[at : at + count].tolist()]
                for i, place in enumerate(step.scratch[r, :count].tolist()):
                    assert place > 0
                    state[place], window[place, :, 0] = states[i], raw[i + 1 : i + 4]
            else:
                state[slot], window[slot, :, 0] = s, last
            where = np.arange(seen, seen + count)
            assert (table[where // page_size] > 0).all()
            pages[table[where // page_size], where % page_size, 0] = (5 * np.array(states) + where) % P
            latents = pages[table[: (seen + count - 1) // page_size + 1]].reshape(-1)[: seen + count]
            attended = np.cumsum(latents * (np.arange(seen + count) + 1) % P)[seen:]
            hidden[at : at + count] = (np.array(states) + np.array(windows) + attended) % P
            at += count
        return torch.from_numpy(hidden)[:, None], torch.empty(0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(scores(hidden[:, 0].numpy()))


def settle(pools, batch, verdicts) -> None:
    """Move each verify row's slot to the end of its kept rows; first the checkpoint its verdict names."""
    kda = pools[0]
    for verdict in verdicts:
        work = verdict.work
        if not work.drafts or not verdict.rows:
            continue
        targets = [(verdict.checkpoint - work.request.seen, verdict.checkpoint_slot)] * bool(
            verdict.checkpoint
        )
        for rows, slot in [*targets, (verdict.rows, work.slot)]:
            assert 0 < rows <= verdict.rows <= work.count
            seen = torch.cat([kda.window[work.slot], kda.rec_x[work.slot, :rows]])
            kda.state[slot] = kda.rec_u[work.slot, rows - 1]
            kda.window[slot] = seen[-3:]


def continue_alone(prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    """The greedy output by the formulas above, without pools, pages or a scheduler."""
    state, total, tokens, output = 0.0, 0.0, [], []
    todo = list(prompt)
    while True:
        for token in todo:
            state = (31 * state + 7 * token + 3) % P
            total += (5 * state + len(tokens)) % P * (len(tokens) + 1) % P
            tokens.append(token)
        a, b, c = ([0, 0, 0] + tokens)[-3:]
        hidden = np.array([(state + 3 * a + 5 * b + 7 * c + total) % P])
        todo = [int(scores(hidden)[0].argmax())]
        output += todo
        if todo[0] in eos or len(output) == max_tokens:
            return output


class Listener:
    """Collects the updates of one request."""

    def __init__(self) -> None:
        self.updates, self.tokens, self.finish, self.error = [], [], None, None

    def __call__(self, update) -> None:
        assert self.finish is None, "an update after the last one"
        self.updates.append(update)
        self.tokens += update.tokens
        self.finish, self.error = update.finish, update.error
        assert update.completion_tokens == len(self.tokens)


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def exporting(model: ToyModel, pools):
    """For make_engine: a forward that leaves the checkpoints a step asks for."""

    def forward(step):
        return model.forward(step, pools, exports=True)

    forward.exports = True
    return forward


def toy_engine(model: ToyModel | None = None, drafter=None, exports: bool = False, **config):
    """An engine over a toy model, with NaN in everything freed. drafter: proposes, when num_drafts allows."""
    small = {"page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "poison": True}
    settings = EngineConfig(**{**small, **config})
    engine = make_engine(model or ToyModel(), settings, exporting if exports else None, drafter=drafter)
    if settings.state_replay:  # the records of the toy are not those of a model
        own = functools.partial(settle, engine.pools)
        engine.speculation = Speculation(drafter, own, bounds=(settings.num_drafts, VOCAB))
    return engine


def run_all(engine, requests: list[Request], steps: int = 100_000) -> dict[str, Listener]:
    """Submit everything, turn the crank until nothing is left, check the books."""
    heard = {r.id: Listener() for r in requests}
    for request in requests:
        engine.submit(request, heard[request.id])
    for _ in range(steps):
        if not engine.step():
            break
    assert_nothing_left(engine)
    return heard


def assert_nothing_left(engine) -> None:
    """Requests own nothing any more, and the index can give everything back."""
    cache = engine.cache
    if engine.tiers is not None:
        assert engine.tiers.drain(20), "what is being stored is not given back"
    cache.check()
    assert (cache.slots.used, cache.available) == (0, cache.pages.size - 1)


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The toy model and what goes with it."""
    return SimpleNamespace(
        Model=ToyModel,
        Listener=Listener,
        VOCAB=VOCAB,
        alone=continue_alone,
        engine=toy_engine,
        greedy=greedy,
        run=run_all,
        assert_nothing_left=assert_nothing_left,
        replace=dataclasses.replace,
    )

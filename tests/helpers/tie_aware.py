"""Judges whether another way of computing may have chosen another token: only at ties, and only at real ones.

    reference (float64)   tokens, two best logits of each, experts and router gaps of each (position, layer)
    candidate (float32)   tokens, experts

A token may differ from the reference's when it is the runner-up within 1e-4, or when the experts really
differed before, and each first difference lies where the reference's router was undecided within 1e-5.
After a difference the texts have parted and nothing more is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from k3compile.kernels.moe import route
from torch import Tensor

LOGIT_GAP, ROUTER_GAP, EXCUSED_SHARE = 1e-4, 1e-5, 0.1


class Reference(NamedTuple):
    """One request alone in float64. n output tokens, p positions run, m MoE layers, k experts a token."""

    prompt_tokens: int
    tokens: Sequence[int]  # n
    best: Sequence[Sequence[tuple[int, float]]]  # n pairs (id, log-probability): the best and the runner-up
    experts: Tensor  # [p, m, k]
    router_gaps: Tensor  # [p, m] score of the last expert chosen minus that of the first left out


class Verdict(NamedTuple):
    """ "same", "tie" or "experts" (both excused), or "wrong"; ``at`` is the first output token that
    differs.
    """

    kind: str
    at: int | None = None


def judge(reference: Reference, tokens: Sequence[int], experts: Tensor) -> Verdict:
    """Hold a candidate's ``tokens`` and ``experts`` [p, m, k] against the reference."""
    if len(tokens) != len(reference.tokens):
        return Verdict("wrong", min(len(tokens), len(reference.tokens)))
    at = next((i for i, (a, b) in enumerate(zip(tokens, reference.tokens)) if a != b), None)
    if at is None:
        return Verdict("same")
    (_, best), (runner_up, second) = reference.best[at]
    if tokens[at] == runner_up and best - second < LOGIT_GAP:
        return Verdict("tie", at)
    run = reference.prompt_tokens + at  # positions that decided this token
    differs = (reference.experts[:run].sort(-1).values != experts[:run].sort(-1).values).any(-1)
    if differs.any() and (reference.router_gaps[:run][first_ones(differs)] < ROUTER_GAP).all():
        return Verdict("experts", at)
    return Verdict("wrong", at)


def first_ones(differs: Tensor) -> Tensor:
    """[p, m] bool: those differences that no other one can have caused, from an earlier position below."""
    earlier = differs.cumsum(0).cumsum(1) > 0  # any at or before this position, at or below this layer
    caused = torch.zeros_like(differs)
    caused[:, 1:] = earlier[:, :-1]
    return differs & ~caused


def assert_identical(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """No request is wrong and few enough are excused; how many are of each kind."""
    wrong = {i: v for i, v in enumerate(verdicts) if v.kind == "wrong"}
    assert not wrong, f"requests whose tokens differ without an excuse: {wrong}"
    counts = {kind: sum(v.kind == kind for v in verdicts) for kind in ("same", "tie", "experts")}
    excused = counts["tie"] + counts["experts"]
    assert excused <= EXCUSED_SHARE * len(verdicts), f"{excused} of {len(verdicts)} excused: {counts}"
    return counts


@contextmanager
def replaced(op, fn: Callable) -> Iterator[None]:
    """Calls of an op's meaning go to ``fn``, in compiled code too, as long as the op is not opened."""
    with torch.library._scoped_library("k3", "IMPL") as library:
        library.impl(op.name, fn, "CPU")
        yield


class RouterLog:
    """Experts of each (position, layer) of each request, while its ``forward`` serves an engine.

    It watches ``route``, which a compiler must not open: lower={"route": "meaning"}.
    """

    def __init__(self) -> None:
        self.experts: dict[str, dict[int, Tensor]] = {}
        self.router_gaps: dict[str, dict[int, Tensor]] = {}
        self._layers: list[tuple[Tensor, Tensor]] = []

    def attach(self, engine) -> None:
        """Watch an engine from now on; use inside :meth:`watching`."""
        forward = engine._forward

        def logged(step):
            self._layers = []
            out = forward(step)
            owners = {h.slot: r.id for r, h in engine.cache._held.items()}
            ids = torch.stack([ids for ids, _ in self._layers], 1)
            gaps = torch.stack([gaps for _, gaps in self._layers], 1)
            counts = torch.cat([step.cu_verify.diff(), step.cu_other.diff()]).tolist()
            rows = zip(step.slots.tolist(), step.seen.tolist(), ids.split(counts), gaps.split(counts))
            for slot, seen, own_ids, own_gaps in rows:
                for i in range(len(own_ids)):
                    self.experts.setdefault(owners[slot], {})[seen + i] = own_ids[i]
                    self.router_gaps.setdefault(owners[slot], {})[seen + i] = own_gaps[i]
            return out

        engine.use(logged)

    @contextmanager
    def watching(self) -> Iterator[RouterLog]:
        with replaced(route, self._route):
            yield self

    def _route(self, x, gate_w, bias, top_k, scale, renormalize):
        weights, ids = route.meaning(x, gate_w, bias, top_k, scale, renormalize)
        scores = torch.sigmoid(x.double() @ gate_w.double().T) + bias
        best = scores.sort(-1, descending=True).values
        self._layers.append((ids.clone(), best[:, top_k - 1] - best[:, top_k]))
        return weights, ids


def stacked(by_position: dict[int, Tensor]) -> Tensor:
    """[p, ...] in the order of positions, which must have no hole."""
    assert sorted(by_position) == list(range(len(by_position)))
    return torch.stack([by_position[i] for i in range(len(by_position))])


@contextmanager
def forced_experts(experts: Tensor) -> Iterator[None]:
    """Every ``route`` call of one pass over all p positions chooses ``experts`` [p, m, k], layer by layer."""
    layers = iter(experts.unbind(1))

    def fn(x, gate_w, bias, top_k, scale, renormalize):
        ids = next(layers)
        logits = (x.double() @ gate_w.double().T).to(torch.promote_types(x.dtype, torch.float32))
        weights = torch.sigmoid(logits).gather(1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * scale, ids.clone()

    with replaced(route, fn):
        yield
    assert next(layers, None) is None, "fewer MoE layers ran than experts were given for"

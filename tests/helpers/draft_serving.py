"""A small target with its draft and their pools, run step by step by hand. Pages of slot s: from 10 s on."""

from __future__ import annotations

import dataclasses
from array import array
from types import SimpleNamespace

import torch
from k3compile.runtime.model import Model
from k3compile.runtime.request import Request
from k3compile.runtime.speculate.dspark import DSparkDrafter
from small_models import SMALL, Row, make_step, small_model

FIVE = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
TAPS = (0, 2, 3)
PAGE = 4


def tapped(config=FIVE, taps=TAPS, state_replay=True) -> Model:
    """A filled target that hands out the streams of these layers."""
    model = Model(config, torch.float64, tap_layers=taps, state_replay=state_replay)
    model.load_state_dict(small_model(config).state_dict())
    return model


def tokens_of(slot: int, count: int) -> list[int]:
    return [(slot * 31 + 5 * i + i * i) % 90 for i in range(count)]


class Serving:
    """Target, draft and their pools, with steps run by hand. Pages of request s: those from 10 s on."""

    def __init__(self, target, draft, num_drafts=5, sampling="probabilistic"):
        self.target = target
        self.pools = target.make_pools(6, 64, PAGE, 8)
        pools = draft.make_pools(64, PAGE)
        for pool in pools:
            pool.pages.fill_(torch.nan)
        self.drafter = DSparkDrafter(draft, target, pools, num_drafts, sampling)

    def run(self, *rows: Row):
        step = make_step(rows)
        with torch.no_grad():
            self.drafter.observe(step, self.target(step, self.pools)[1])

    def propose(self, *asked):
        """Drafts of (slot, tokens, params): all tokens but the last are in the pages."""
        requests = []
        for slot, tokens, params in asked:
            requests.append(Request(str(slot), tokens, params))
            requests[-1].seen = len(tokens) - 1
        held = [SimpleNamespace(pages=pages_of(slot), slot=slot) for slot, _, _ in asked]
        return self.drafter.propose(requests, held)


def pages_of(slot: int) -> array:
    return array("q", range(10 * slot, 10 * slot + 10))


def row(slot: int, begin: int, end: int, tokens=None, verify=False) -> Row:
    tokens = tokens_of(slot, end)[begin:] if tokens is None else tokens
    return Row(tokens, slot, begin, pages_of(slot), verify)


def taps_of(target, tokens):
    """The target's taps of a whole sequence, run alone and at once."""
    with torch.no_grad():
        pools = target.make_pools(2, 20, 8)
        return target(make_step([Row(tokens, 1, 0, range(1, 20))]), pools)[1]

"""The trained tiny model and its draft, read by eight ranks, write what one rank writes."""

from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.dspark import DSparkDrafter
from k3compile.runtime.speculate.dspark_weights import load_draft
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.weights import load_model
from small_models import Row, make_step
from threaded_ranks import on_threads

import k3compile

TRAINED = Path(k3compile.__file__).parent / "data" / "k3-tiny"
PROMPT = "The state of a request is"
GREEDY = SamplingParams(temperature=0.0)
NEW, PAGES = 16, array("q", [1, 2, 3, 4])


def written(_rank: int = 0) -> tuple[list[int], list[list[int]], float]:
    """Tokens after the prompt, what the draft proposed before each, and the narrowest choice between two."""
    draft = load_draft(TRAINED / "draft", K3Config.from_file(TRAINED), torch.float64)
    model = load_model(TRAINED, torch.float64, tap_layers=draft.config.target_layer_ids)
    pools = model.make_pools(2, 5, 16)
    drafter = DSparkDrafter(draft, model, draft.make_pools(5, 16), 7)
    tokens, proposed, seen, gap = Tokenizer(TRAINED).encode(PROMPT), [], 0, torch.inf
    prompt = len(tokens)
    while len(tokens) < prompt + NEW:
        step = make_step([Row(tokens[seen:], 1, seen, PAGES)])
        hidden, taps = model(step, pools)
        drafter.observe(step, taps)
        best = model.logits(hidden[-1]).topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        seen = len(tokens)
        tokens.append(int(best.indices[0]))
        request = Request("one", tokens, GREEDY)
        request.seen = seen
        (made,) = drafter.propose([request], [SimpleNamespace(pages=PAGES, slot=1)])
        proposed.append(made.tokens)
    return tokens[prompt:], proposed, gap


@pytest.mark.slow
def test_eight_ranks_write_and_draft_what_one_does():
    with torch.no_grad():
        tokens, proposed, gap = written()
    assert gap > 1e-6, "the prompt has a choice that rounding may decide: take another"
    assert len(set(tokens)) > 3
    for got in on_threads(8, written):
        assert got[:2] == (tokens, proposed)

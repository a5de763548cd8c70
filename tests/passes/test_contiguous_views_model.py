"""On the model's own layers every index operation of the mixed batch is proven and gone, for every batch."""

import random

import pytest
import torch
from compiled import Compiled, copies
from k3compile.runtime.model import UNBACKED_SOURCES, DecoderLayer
from small_models import SMALL, Row, make_step, small_model

SLOTS, PAGES, PAGE, DRAFTS = 24, 40, 16, 3


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["replay", "states"]
)
def model(request):
    return small_model(state_replay=request.param)


def kinds(model):
    """The first layer of each kind, with its number."""
    first = {}
    for number in range(SMALL.num_hidden_layers):
        first.setdefault(SMALL.kind(number), number)
    return first


def mix(rng):
    """A step of random rows, any part of it empty but not all."""
    verify = [rng.randint(1, DRAFTS + 1) for _ in range(rng.choice([0, 0, 1, 3]))]
    other = [rng.choice([1, 1, 1, 2, 17, 66]) for _ in range(rng.choice([0, 1, 1, 4]))]
    lengths = [*((n, True) for n in verify), *((n, False) for n in other)] or [(1, False)]
    rows = []
    for slot, (length, is_verify) in enumerate(lengths, 1):
        tokens = [rng.randrange(SMALL.vocab_size) for _ in range(length)]
        pages = [slot * 4 - 3 + i for i in range(-(-(length + 5) // PAGE))]
        scratch = [slot, *(11 + 3 * slot + i for i in range(length - 1))] if is_verify else ()
        rows.append(Row(tokens, slot, rng.randrange(6), pages, is_verify, scratch))
    return make_step(rows, drafts=DRAFTS)


def call(model, number, step, rng):
    """Arguments of ``DecoderLayer.forward`` for a step, and the tensors it may write."""
    made = torch.Generator().manual_seed(rng.randrange(1000))
    rows, width = step.tokens.shape[0], SMALL.hidden_size
    taken = sum(SMALL.is_snapshot(i) for i in range(number + 1))
    normal = torch.randn(rows * (taken + 1), width, generator=made, dtype=torch.float64)
    p, blocks = normal[:rows], normal[rows:].view(taken, rows, width)
    pools = model.make_pools(SLOTS, PAGES, PAGE, DRAFTS)[number]
    filled = [torch.randn(t.shape, generator=made, dtype=t.dtype) for t in pools]
    return p, blocks, type(pools)(*filled), step


def some(model):
    """A KDA layer with experts and one snapshot taken."""
    return {kind: number for kind, number in kinds(model).items() if number == 1}


@pytest.mark.parametrize(
    ("chosen", "decompose"),
    [
        (some, True),
        pytest.param(kinds, False, marks=pytest.mark.slow),
        pytest.param(kinds, True, marks=pytest.mark.slow),
    ],
)
def test_eight_index_operations_become_none_in_every_kind_of_kda_layer(model, chosen, decompose):
    for kind, number in chosen(model).items():
        compiled = Compiled(DecoderLayer.forward, decompose=decompose, unbacked=UNBACKED_SOURCES)
        compiled(model.layers[number], *call(model, number, mix(random.Random(0)), random.Random(0)))
        at = [r for r in compiled.remarks("applied") if "attention.py" in r.source]
        ops = [r.op.removeprefix("aten.") for r in at]
        gather, scatter = ("index", "index_put") if decompose else ("index_select", "index_copy")
        assert ops == ([gather] * 6 + [scatter] * 2 if SMALL.is_kda(number) else []), kind
        assert all(not r.detail.startswith("slice_scatter") for r in at), "the ops write their own rows"
        assert all({"0 <= start", "end <= size"} <= {p.obligation for p in r.proofs} for r in at)
        left = {r.reason for r in compiled.remarks("missed")}
        assert left <= {"index comes from k3.experts_unfinalized (R1)"}, kind


@pytest.mark.parametrize("chosen", [some, pytest.param(kinds, marks=pytest.mark.slow)])
def test_every_batch_gives_the_bits_of_the_plain_layer_from_one_graph(model, chosen):
    rng = random.Random(1)
    for kind, number in chosen(model).items():
        compiled = Compiled(DecoderLayer.forward, unbacked=UNBACKED_SOURCES)
        layer = model.layers[number]
        for _ in range(12):
            p, blocks, pools, step = call(model, number, mix(rng), rng)
            plain = type(pools)(*copies(pools))
            with torch.no_grad():
                expected = layer(p, blocks, plain, step)
            assert torch.equal(compiled(layer, p, blocks, pools, step), expected), kind
            assert all(map(torch.equal, pools, plain)), kind
        assert len(compiled.graphs) == 1, kind


@pytest.mark.slow
def test_all_layers_in_one_graph_are_proven_in_a_second_or_two(model):
    rows = [
        Row([1, 2], 1, verify=True, pages=[1], scratch=[1, 9]),
        Row([3], 2, pages=[2]),
        Row([4, 5, 6], 3, pages=[3]),
    ]
    unbacked = ",".join(name for name in UNBACKED_SOURCES.split(",") if "step" in name)
    compiled = Compiled(lambda step, pools: model(step, pools), unbacked=unbacked, verify="off")
    compiled(make_step(rows, drafts=DRAFTS), model.make_pools(SLOTS, PAGES, PAGE, DRAFTS))
    assert len(compiled.applied()) == 8 * len(SMALL.kda_layers)
    assert sum(record.seconds for record in compiled.records) < 20, "it took 29 s before facts were indexed"

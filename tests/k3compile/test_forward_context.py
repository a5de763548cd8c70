"""Compiled layers whose tokens lie on several ranks: one graph a kind, the same on every rank."""

import dataclasses
from collections import Counter

import pytest
import torch
from context_ranks import EIGHT, contexts, serve_compiled, served
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks
from lanes import slow
from pretended_group import pretended_group
from rank_pool import RankPool
from small_models import Row, make_step, small_model

from k3compile.dump import recording
from k3compile.forward import compile_forward
from k3compile.graph_capture import timelines
from k3compile.options import CompileOptions

MLA_ONLY = dataclasses.replace(
    EIGHT, num_hidden_layers=1, kda_layers=(), first_k_dense_replace=1, attn_res_block_size=0
)
MIXES = [
    [Row([1], 1, 0, [1])],
    [Row([1, 2, 3], 1, 5, [1, 2], True), Row([4], 2, 9, [3, 4]), Row(list(range(20)), 3, 0, [5, 6, 7])],
    [Row([1, 2], 1, 0, [2], True)],
    [Row(list(range(9)), 1, 0, [2, 3])],
    [Row([1], i + 1, 30, [i + 1, i + 2, 3, 4]) for i in range(8)],
]
STEPS = contexts([0, 5, 19, 8], 8, [(4, True), (1, False), (3, True), (9, False)].__getitem__)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_on(rank: int, inner: str) -> tuple[list[str], Counter]:
    """(digests of the graph of the one layer by stage, its collectives) of one of 8 ranks in groups of 4."""
    with (
        pretended_group(8, rank) as everyone,
        pretended_group(4, rank % 4, "context") as group,
        recording() as seen,
    ):
        model = Model(MLA_ONLY, ranks=Ranks(rank, 8, everyone, 4, group))
        for parameter in model.parameters():
            parameter.zero_()
        forward = compile_forward(model, model.make_pools(9, 12, 8), CompileOptions(inner=inner), 8)
        for mix in MIXES:
            hidden, _ = forward(make_step(mix))
            assert hidden.shape[0] == sum(len(row.tokens) for row in mix)
        assert forward.graphs() == 1, "a mix was compiled for itself"
    nodes = timelines(seen)[0].stages[-1].snapshot["nodes"]
    targets = [node["target"].removesuffix(".default") for node in nodes if "target" in node]
    sent = Counter(t.removeprefix("_c10d_functional.") for t in targets if t.startswith("_c10d_functional."))
    return forward.reports[0], sent


@pytest.mark.parametrize("inner", [slow("eager"), "aot_eager"])
def test_one_graph_for_all_mixes_and_it_is_the_same_on_every_rank(inner):
    one, sent = compiled_on(0, inner)
    assert sent["all_gather_into_tensor"] == sent["all_to_all_single"] == 1
    assert sent["all_reduce"] == sent["wait_tensor"] - 2
    other, _ = compiled_on(6, inner)
    assert (other.key, other.graphs) == (one.key, one.graphs)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_makes_one_graph_as_well():
    _, sent = compiled_on(5, "inductor")
    assert sent["all_gather_into_tensor"] == sent["all_to_all_single"] == 1


@pytest.mark.slow
@pytest.mark.tp
@pytest.mark.parametrize(
    ("config", "inner", "dtype", "bound"),
    [
        (EIGHT, "aot_eager", torch.float64, 1e-9),
        pytest.param(MLA_ONLY, "inductor", torch.float32, 1e-4, marks=pytest.mark.inductor),
    ],
    ids=["aot_eager", "inductor"],
)
def test_compiled_ranks_give_what_one_rank_gives(config, inner, dtype, bound):
    with torch.no_grad():
        expected = served(small_model(config, dtype), 8, STEPS)
    with RankPool(2) as pool:
        for hidden in pool.run(serve_compiled, config, inner, dtype, 8, STEPS):
            for got, want in zip(hidden, expected, strict=True):
                assert (got - want).abs().max() <= bound * want.abs().max()

"""What Dynamo makes of the model: one graph for each kind of layer, whatever comes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from k3compile.runtime.model import UNBACKED_SOURCES, DecoderLayer
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model

NUM_MIXES = 50
FIVE = replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)


class Counting:
    """A Dynamo backend that keeps the graphs it is given and passes them on."""

    def __init__(self, inner: str = "eager") -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, gm, inputs, **kwargs):
        self.graphs.append(gm)
        return self.inner(gm, inputs, **kwargs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_layer(model, pools, backend):
    """DecoderLayer.forward compiled for every kind by one step of one token on the null slot and page."""
    with torch.no_grad(), torch.compiler.config.patch(unbacked_sources=UNBACKED_SOURCES):
        layer = torch.compile(DecoderLayer.forward, backend=backend, fullgraph=True)
        model(make_step([Row([1], 0, 0, [0])]), pools, layer=layer)
    return layer


def random_rows(random_state: random.Random, seen: dict[int, int], pages: dict[int, range]) -> list[Row]:
    """Any mix of verify, decode and prefill rows for requests with room left; possibly of one class only.

    Slot s owns s, 3 + 3 s, 4 + 3 s and 5 + 3 s for the states of its rows.
    """
    classes = random_state.choice(["v", "d", "p", "vd", "vp", "dp", "vdp"])
    rows = []
    for slot in random_state.sample(sorted(seen), random_state.randint(1, 4)):
        kind = random_state.choice(classes)
        count = {"v": random_state.randint(1, 4), "d": 1, "p": random_state.randint(2, 12)}[kind]
        tokens = [random_state.randrange(90) for _ in range(count)]
        scratch = (slot, 3 + 3 * slot, 4 + 3 * slot, 5 + 3 * slot)[:count]
        rows.append(Row(tokens, slot, seen[slot], pages[slot], kind == "v", scratch))
    return rows


@pytest.mark.parametrize("inner", ["aot_eager"])
@pytest.mark.parametrize(
    ("config", "kinds", "replay"),
    [
        *(pytest.param(config, 4, True, marks=pytest.mark.slow) for config in (FIVE, SMALL)),
        pytest.param(SMALL_LINEAR, 3, True, marks=pytest.mark.slow),
        pytest.param(SMALL_LINEAR, 3, False, marks=pytest.mark.slow),
    ],
    ids=["five", "k3", "kimi-linear", "states"],
)
def test_one_graph_for_each_kind_of_layer_over_random_mixes(config, kinds, replay, inner):
    model, backend = small_model(config, state_replay=replay), Counting(inner)
    pools, plain = (model.make_pools(21, 200, 8, max_drafts=3) for _ in range(2))
    layer = compiled_layer(model, pools, backend)
    assert len(backend.graphs) == kinds == len({config.kind(i) for i in range(config.num_hidden_layers)})
    chance, seen = random.Random(0), dict.fromkeys(range(1, 6), 0)
    pages = {slot: range(1 + 39 * (slot - 1), 1 + 39 * slot) for slot in seen}
    ones = empty = 0
    with torch.no_grad():
        for _ in range(NUM_MIXES):
            rows = random_rows(chance, seen, pages)
            step = make_step(rows)
            ones, empty = ones + (len(step.tokens) == 1), empty + int((step.spans == 0).any())
            hidden, _ = model(step, pools, layer=layer)
            expected, _ = model(step, plain)
            assert (hidden - expected).abs().max() <= 1e-12 * expected.abs().max()
            for row in rows:
                kept = len(row.tokens) if not row.verify else 0 if replay else 1  # row 0 moved its own slot
                seen[row.slot] += kept
    assert ones > 0
    assert empty > 0
    assert len(backend.graphs) == kinds, "a mix was compiled for itself"


def test_the_kda_graph_holds_the_naive_index_operations_and_its_collectives():
    model, backend = small_model(), Counting()
    compiled_layer(model, model.make_pools(2, 2, 8, max_drafts=3), backend)
    counts = [Counter(target_name(node) for node in gm.graph.nodes) for gm in backend.graphs]
    # in order of first call: KDA + dense + snapshot, KDA + MoE, MLA + MoE, KDA + MoE + snapshot
    assert [c["index_select"] for c in counts] == [6, 7, 1, 7]  # one of them is the experts' unpermute
    assert [c["index_copy_"] for c in counts] == [2, 2, 0, 2]
    assert [c["arange"] for c in counts] == [2, 2, 0, 2]
    assert [c["all_reduce"] for c in counts] == [c["wait_tensor"] for c in counts] == [2, 3, 3, 3]
    for name in ("kda_prefill", "kda_verify", "short_conv", "short_conv_verify"):
        assert [c[name] for c in counts] == [1, 1, 0, 1]
    assert [c["experts_unfinalized"] for c in counts] == [0, 1, 1, 1]
    assert not any(c["finalize"] for c in counts)


def target_name(node: torch.fx.Node) -> str:
    """index_select, all_reduce, kda_prefill ... without namespace and overload."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.removesuffix(".default").split(".")[-1]


@pytest.mark.slow
def test_the_whole_model_traces_into_one_graph_as_well():
    model, backend = small_model(FIVE), Counting("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    pools, plain = (model.make_pools(3, 9, 8, max_drafts=3) for _ in range(2))
    with torch.no_grad():
        for rows in ([Row(list(range(9)), 1, 0, [1, 2])], [Row([3], 1, 9, [1, 2]), Row([4, 5], 2, 0, [3])]):
            step = make_step(rows)
            hidden, _ = compiled(step, pools)
            expected, _ = model(step, plain)
            assert (hidden - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.slow
def test_leaving_out_one_source_costs_graphs():
    model, backend = small_model(SMALL_LINEAR), Counting()
    pools = model.make_pools(4, 9, 8, max_drafts=3)
    without = ",".join(s for s in UNBACKED_SOURCES.split(",") if "cu_verify" not in s)
    with torch.no_grad(), torch.compiler.config.patch(unbacked_sources=without):
        layer = torch.compile(DecoderLayer.forward, backend=backend, fullgraph=True)
        for rows in (
            [Row([1], 0)],
            [Row([1, 2], 1, 0, [1], True)],
            [Row([1, 2], 1, 0, [1], True), Row([1], 2)],
        ):
            model(make_step(rows), pools, layer=layer)
    assert len(backend.graphs) > 3

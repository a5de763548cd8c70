"""A model shared by ranks is the model: results, pools, chosen experts, and the collectives it takes."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from k3compile.runtime.moe import Moe
from k3compile.runtime.parallel.ranks import Ranks, world
from k3compile.runtime.parallel.sharding import HEAD, WHOLE, Shard, part_of
from k3compile.runtime.presets import PRESETS
from k3compile.runtime.weights import load_model
from rank_parts import Collectives, part
from small_models import SMALL, Row, dealt, make_step, small_model
from threaded_ranks import on_threads
from torch.utils._python_dispatch import TorchDispatchMode

RELEASED = K3Config.from_file(Path(__file__).parents[1] / "data" / "kimi-k3-config.json")
NEAR = 1e-9  # relative, float64: sums over ranks are made in another order
POOLS = {  # what a rank holds of a pool
    "state": Shard(1, HEAD),
    "window": Shard(2, HEAD, blocks=3),
    "rec_u": Shard(2, HEAD),
    "rec_k": Shard(2, HEAD),
    "rec_g": Shard(2, HEAD),
    "rec_x": Shard(2, HEAD, blocks=3),
    "pages": WHOLE,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A K3 and a Kimi-Linear that eight ranks can share, as files."""
    sizes = {"k3": PRESETS["tiny"], "linear": dataclasses.replace(PRESETS["tiny-linear"], heads=8)}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setitem(PRESETS, name, size)
        return {name: make_checkpoint(tmp_path_factory.mktemp(name) / name, name) for name in sizes}


def tokens(slot: int, start: int, stop: int) -> list[int]:
    return [(slot * 131 + 17 * i * i + 3 * i) % 700 for i in range(start, stop)]


PAGES = {1: [1, 2, 3], 2: [4, 5], 3: [6, 7], 4: [8, 9, 10]}


def traffic() -> list[list[Row]]:
    """Prompts; then a verify row, a decode, a second chunk and a new prompt; then two decodes."""
    first = [Row(tokens(s, 0, n), s, 0, PAGES[s]) for s, n in ((1, 5), (2, 9), (3, 21))]
    mixed = [
        Row(tokens(1, 5, 9), 1, 5, PAGES[1], verify=True),
        Row(tokens(2, 9, 10), 2, 9, PAGES[2]),
        Row(tokens(3, 21, 24), 3, 21, PAGES[3]),
        Row(tokens(4, 0, 37), 4, 0, PAGES[4]),
    ]
    return [first, mixed, [Row(tokens(1, 7, 8), 1, 7, PAGES[1]), Row(tokens(4, 37, 38), 4, 37, PAGES[4])]]


def served(model: Model):
    """(hidden, taps and logits of each step, the pools after them)."""
    pools = model.make_pools(6, 12, 16, max_drafts=3)
    seen = []
    for index, rows in enumerate(traffic()):
        hidden, taps = model(make_step(rows), pools)
        seen.append((hidden, taps, model.logits(hidden)))
        if index == 1:  # two of the drafts are kept
            for pool in pools:
                if isinstance(pool, KdaPools):
                    one, two = torch.tensor([1]), torch.tensor([2])
                    torch.ops.k3.kda_commit(*pool, one, two, one)
    return seen, pools


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= NEAR * b.abs().max())


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("linear", 4),
        ("k3", 2),
        *(pytest.param("k3", n, marks=pytest.mark.slow) for n in (4, 8)),
        *(pytest.param("linear", n, marks=pytest.mark.slow) for n in (2, 8)),
    ],
)
def test_ranks_give_what_one_gives(folders, name, n):
    alone, pools = served(load_model(folders[name], torch.float64, tap_layers=(1, 3)))

    def work(rank: int):
        model = load_model(folders[name], torch.float64, tap_layers=(1, 3))
        assert model.place.ranks[:2] == (rank, n)
        return served(model)

    every = on_threads(n, work)
    for rank, (seen, own) in enumerate(every):
        for got, want in zip(seen, alone, strict=True):
            assert all(near(a, b) for a, b in zip(got, want, strict=True))
        for mine, whole in zip(own, pools, strict=True):
            for field, tensor in mine._asdict().items():
                want = part_of(getattr(whole, field), POOLS[field], Ranks(rank, n, ""))
                assert near(tensor, want), field
        for one, other in zip(seen, every[0][0]):  # what a rank decides by is the same to the last bit
            assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_one_rank_looks_up_and_scores_as_before():
    model, ids = small_model(SMALL), torch.tensor([[3, 95], [0, 41]])
    assert torch.equal(model.embed(ids), model.embed_tokens[ids])
    hidden = torch.randn(2, 3, SMALL.hidden_size, dtype=torch.float64)
    assert torch.equal(model.logits(hidden), hidden @ model.lm_head.weight.T)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_of_four_ranks_take_any_shape(tied):
    config = dataclasses.replace(SHARED, tie_word_embeddings=tied)
    whole, ids = small_model(config), torch.tensor([[3, 95, 24], [0, 41, 71]])
    hidden = torch.randn(2, 3, config.hidden_size, dtype=torch.float64)
    want = [whole.logits(h) for h in (hidden, hidden[0], hidden[0, 0], hidden[:0])]

    def work(rank: int) -> None:
        model = part(whole, world())
        assert torch.equal(model.embed(ids), whole.embed_tokens[ids])
        got = [model.logits(h) for h in (hidden, hidden[0], hidden[0, 0], hidden[:0])]
        assert [g.shape for g in got] == [w.shape for w in want]
        assert all(torch.allclose(g, w, rtol=1e-13, atol=1e-13) for g, w in zip(got, want))

    on_threads(4, work)


SHARED = dealt(4, attn_res_block_size=3)


@pytest.mark.parametrize("latent", [64, 0])
def test_a_small_shared_part_beside_a_large_routed_one_is_counted_once(latent):
    """Counted once a rank, it would be off by n - 1 times itself, which a large routed part hides."""
    whole = small_model(dataclasses.replace(SHARED, routed_expert_hidden_size=latent, hidden_size=64))
    moe: Moe = whole.layers[1].ffn
    moe.shared_experts.down_proj.weight.mul_(1e-4)
    moe.scale = 1e3
    if latent:
        moe.routed_expert_norm.weight.mul_(1e3)
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want, small = moe(x), moe.shared_experts(x)
    assert want.abs().mean() > 1e6 * small.abs().mean()

    def work(rank: int) -> None:
        own = part(whole, world()).layers[1].ffn
        own.scale = 1e3
        off = own(x) - want
        assert off.abs().max() < 1e-4 * small.abs().mean()
        assert near(own.shared_experts(x), small)

    on_threads(4, work)


class Chosen(TorchDispatchMode):
    """Expert ids of every router call."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.k3.route.default:
            self.ids.append(out[1])
        return out


def test_ties_choose_the_same_experts_on_all_ranks():
    whole = small_model(SHARED)
    for index, layer in enumerate(whole.layers):
        if SHARED.is_moe(index):  # pairs of experts with equal scores, and in one layer all equal
            layer.ffn.gate[1::2] = layer.ffn.gate[::2]
            layer.ffn.e_score_correction_bias.zero_()
    whole.layers[2].ffn.gate.zero_()
    step = make_step([Row(list(range(20)), 1, 0, [1, 2]), Row([7], 2, 0, [3])])

    def run(model: Model) -> list[torch.Tensor]:
        with Chosen() as chosen:
            model(step, model.make_pools(3, 4, 16))
        return chosen.ids

    alone, every = run(whole), on_threads(4, lambda rank: run(part(whole, world())))
    assert len(alone) == 4
    assert bool((alone[1] == torch.tensor([0, 1])).all())
    for ids in every:
        assert all(torch.equal(a, b) for a, b in zip(ids, alone, strict=True))


def counted(config: K3Config, n: int, dtype: torch.dtype, rows: int) -> Collectives:
    """A step of ``rows`` tokens of one request, and its logits, without numbers."""
    model = Model(config, dtype, "meta", ranks=Ranks(n - 1, n, "all of them"))
    step = make_step([Row([1] * rows, 1, 0, [1])])
    on_meta = {name: tensor.to("meta") for name, tensor in step._asdict().items() if name != "spans"}
    with Collectives() as seen:
        hidden, _ = model(step._replace(**on_meta), model.make_pools(2, 2, 64))
        assert model.logits(hidden).shape == (rows, config.vocab_size)
    return seen


def test_tiny_takes_27_sums_and_a_gather_a_step(folders):
    config = K3Config.from_file(folders["k3"])
    seen = counted(config, 8, torch.float32, 5)
    width, latent, vocab = config.hidden_size, config.latent_size, config.vocab_size
    assert seen.number == {
        ("all_reduce", width): 9 + 1 + 8 + 1,  # attention, dense, shared experts, embedding
        ("all_reduce", latent): 8,
        ("all_gather_into_tensor", vocab // 8): 1,
    }
    assert seen.bytes == {
        "all_reduce": 5 * 4 * (19 * width + 8 * latent),
        "all_gather_into_tensor": 5 * 4 * vocab // 8,
    }


def test_the_release_takes_279_sums_and_a_gather_a_step():
    seen = counted(RELEASED, 8, torch.bfloat16, 4)
    assert seen.number == {
        ("all_reduce", 7168): 93 + 1 + 92 + 1,
        ("all_reduce", 3584): 92,
        ("all_gather_into_tensor", 20480): 1,
    }
    assert seen.bytes["all_reduce"] == 4 * 2 * (187 * 7168 + 92 * 3584)
    assert math.prod((4, 2, 20480)) == seen.bytes["all_gather_into_tensor"]


def test_threads_make_the_collectives_that_are_counted(folders):
    def work(rank: int):
        model = load_model(folders["k3"])
        with Collectives() as seen:
            hidden, _ = model(make_step([Row([1] * 5, 1, 0, [1])]), model.make_pools(2, 2, 64))
            model.logits(hidden)
        return seen.number, seen.bytes

    number, num_bytes = on_threads(8, work)[3]
    want = counted(K3Config.from_file(folders["k3"]), 8, torch.float32, 5)
    assert (number, num_bytes) == (want.number, want.bytes)


def test_pages_are_whole_on_every_rank_without_context_groups():
    pools = Model(SHARED, device="meta", ranks=Ranks(2, 4, "")).make_pools(3, 5, 16)
    pages = [pool.pages for pool in pools if isinstance(pool, MlaPools)]
    assert [p.shape for p in pages] == [(5, 16, SHARED.kv_lora_rank + SHARED.qk_rope_head_dim)]

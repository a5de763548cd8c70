"""A plan's bytes are those of the ranks that really load, and every parameter has its kind."""

from collections import Counter

import pytest
import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.parallel.ranks import Ranks, world
from k3compile.runtime.speculate.dspark_weights import load_draft
from k3compile.runtime.weights import load_model
from small_models import SMALL, SMALL_LINEAR
from threaded_ranks import on_threads

from k3compile.cli.loading import SHIPPED
from k3compile.planning.released import read_draft, read_model
from k3compile.planning.weights import DRAFT, KINDS, bytes_by_kind, kind_of, make_model, total_bytes, weigh


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_bytes_are_those_of_every_rank_that_really_loads(ranks):
    config = K3Config.from_file(SHIPPED)
    draft = read_draft(str(SHIPPED / "draft"), config)
    planned = weigh(config, draft, ranks, "float32")

    def work(rank):
        drafting = load_draft(SHIPPED / "draft", config, torch.float32)
        model = load_model(SHIPPED, torch.float32, tap_layers=drafting.config.target_layer_ids)
        assert (model.place.ranks.size, model.place.ranks.rank) == (ranks, rank)
        return bytes_by_kind(model) | {DRAFT: total_bytes(drafting)}

    loaded = on_threads(ranks, work) if ranks > 1 else [work(world().rank)]
    assert loaded == [planned] * ranks


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR, read_model("kimi-k3"), read_model("kimi-linear")])
def test_every_parameter_has_exactly_one_kind(config):
    model = make_model(config, Ranks(0, 1, ""), "bfloat16")
    kinds = bytes_by_kind(model)
    assert sum(kinds.values()) == total_bytes(model)
    found = Counter(kind_of(config, name) for name, _ in model.named_parameters())
    assert set(found) <= {kind for kind, _ in KINDS}


def test_kimi_k3_whole_is_what_its_files_hold():
    kinds = weigh(read_model("kimi-k3"), None, 1, "bfloat16")
    assert abs(sum(kinds.values()) - 1_559_965_606_912) < 1_000_000  # A_log is stored longer than it is used
    codes_and_scales = 92 * 896 * 3 * 3072 * (3584 // 2 + 3584 // 32)
    assert kinds["routed experts"] == codes_and_scales


def test_what_is_dealt_out_shrinks_with_the_ranks_and_what_is_not_stays():
    one, eight = (weigh(read_model("kimi-k3"), None, n, "bfloat16") for n in (1, 8))
    assert all(
        eight[k] * 8 == one[k] for k in ("embedding", "output head", "routed experts", "shared experts")
    )
    assert all(eight[k] == one[k] for k in ("router", "latent projections", "norms and depth mixes"))
    low_rank = 24 * (2112 * 7168 + 1536 + 512) * 2  # MLA's, which every rank has
    assert eight["MLA"] == (one["MLA"] - low_rank) // 8 + low_rank


def test_a_parameter_without_a_kind_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match=r"no kind for the parameter layers\.0\.new\.weight"):
        kind_of(SMALL, "layers.0.new.weight")

"""A model's graphs come without its weights: one a kind, and what runs outside of layers."""

import dataclasses

import pytest
import torch
from k3compile.runtime.parallel.ranks import world
from small_models import SMALL

from k3compile.dry_run.mix import Mix
from k3compile.dry_run.trace import LOGITS, OUTSIDE, trace
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")
HUGE = dataclasses.replace(
    SMALL, num_hidden_layers=3, kda_layers=(1, 2), first_k_dense_replace=0, attn_res_block_size=0,
    num_experts=16384, moe_intermediate_size=2**20,
)  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    """Two kinds whose experts would take 4.3 TB a layer, and as bfloat16 as it is wished."""
    return trace(HUGE, world(), Mix(), CompileOptions(inner="aot_eager"), torch.bfloat16)


def test_every_kind_is_traced_once_for_all_its_layers(parts):
    assert [(p.name, p.layers) for p in parts] == [
        ("mla+moe", (0,)),
        ("kda+moe", (1, 2)),
        (OUTSIDE, ()),
        (LOGITS, ()),
    ]
    assert [p.compiled for p in parts] == [True, True, False, False]
    assert all(p.timeline.graph == p.report.key for p in parts)


def test_rows_are_symbols_and_weights_have_their_real_sizes(parts):
    (p, experts) = (
        next(n["value"] for n in parts[1].timeline.stages[0].snapshot["nodes"] if n.get("input") == name)
        for name in ("p", "self.ffn.experts.w1")
    )
    assert isinstance(p["shape"][0], str)
    assert p["dtype"] == "bfloat16"
    assert experts["shape"] == [16384, 2**20, 32]


def test_no_pass_touches_what_serving_does_not_compile(parts):
    for part in parts[2:]:
        assert part.report.applied("contiguous_views") == 0
        before = part.timeline.stage("aten").snapshot
        assert any(n["target"] == "k3.rms_norm.default" for n in before["nodes"]) == (part.name == OUTSIDE)


def test_the_passes_ran_on_the_layers(parts):
    assert parts[1].report.applied("contiguous_views") == 8
    assert parts[1].report.applied("latent_tail") == 1

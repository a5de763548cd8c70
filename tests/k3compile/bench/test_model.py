"""A benchmark measures what it says: every mode runs the same passes, and the counted work is right."""

from functools import partial

import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.weights import load_model

from k3compile.bench.limits import measure
from k3compile.bench.model import MODES, Passes, bench, bench_one, host_by_kind, matmul_flops, touched_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    make_checkpoint(folder, "tiny", seed=0)
    return load_model(folder)


def test_eager_is_measured_with_as_many_rounds_as_were_asked_for(model):
    host = host_by_kind(("eager",), rounds=2)
    result = bench_one("tiny", model, ("eager",), 8, 2, 3, host)
    (mode,) = result.modes
    assert len(mode.prefill.values) == len(mode.ttft.values) == len(mode.decode.values) == 3
    assert mode.ttft.median > 0
    assert mode.compile_seconds == 0
    assert mode.host_per_layer > 0
    assert mode.peak_bytes > 1e7


def test_a_repeated_prefill_starts_from_the_same_state(model):
    pools = model.make_pools(2, 2, 64)
    passes = Passes(model, pools, partial(model, pools=pools), 8, 1)
    first = passes.prefill()
    passes.decode(3)
    assert torch.equal(passes.prefill(), first)


def test_a_decode_token_touches_the_chosen_experts_and_one_row_of_the_embedding(model):
    config = model.config
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    experts = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n)
    embedding = model.embed_tokens.numel() * 4
    chosen = experts * config.num_experts_per_token // config.num_experts
    assert touched_bytes(model) == everything - experts + chosen - embedding + config.hidden_size * 4


def test_flops_grow_with_the_prompt_and_count_two_a_weight(model):
    assert matmul_flops(model, 10) == 10 * matmul_flops(model, 1)
    dense = sum(p.numel() for p in model.layers[0].parameters() if p.dim() == 2 and p.shape[-1] != 4)
    assert matmul_flops(model, 1) > 2 * dense


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"modes are eager, inductor, plain, k3 \(unknown: fast\)"):
        bench(["tiny"], modes=["fast"])


def test_matrices_are_kept_as_asked(monkeypatch):
    monkeypatch.setattr("k3compile.bench.model.measure", lambda side: measure(side=64))  # a second, not ten
    with pytest.raises(ValueError, match="resident is 'int8' and must be one of float32, bfloat16"):
        bench(["tiny"], resident="int8")
    sizes = {
        kept: bench(["tiny"], ("eager",), 4, 1, 1, kept)[1][0].decode_bytes
        for kept in ("float32", "bfloat16")
    }
    assert sizes["bfloat16"] < 0.65 * sizes["float32"]


def test_counts_below_one_are_refused_together():
    with pytest.raises(ValueError, match="decode must be at least 1, got 0; rounds must be at least 1"):
        bench(["tiny"], decode=0, rounds=-1)


@pytest.mark.slow
@pytest.mark.inductor
def test_all_modes_run_and_k3_is_not_slower_than_plain_inductor():
    _, (result,) = bench(["tiny"], ("eager", "inductor", "k3"), prompt=256, decode=16, rounds=7)
    modes = {mode.mode: mode for mode in result.modes}
    assert set(modes) < set(MODES)
    # A shared machine disturbs single rounds: the fastest round of each is compared.
    assert min(modes["k3"].decode.values) < min(modes["inductor"].decode.values)
    assert min(modes["k3"].prefill.values) < min(modes["inductor"].prefill.values) * 1.15

"""The benchmark of kernels: every op with a second implementation here has a cell, and numbers add up."""

import os

import pytest
import torch
from k3compile.kernels.op import OPS

from k3compile.bench import kernels
from k3compile.bench.kernels import (
    CELLS,
    LIMIT_OF,
    READ,
    Cell,
    MachineLimits,
    Result,
    bench,
    implementations_here,
    replayed,
    table,
)

SHARED = {f"kda_prefill{form}" for form in ("_into", "_export", "_export_into")}  # kda_prefill's own kernels
SHARED |= {"kda_verify_into", "kda_verify_states_into", "short_conv_export"}


def test_every_op_with_a_second_implementation_here_has_a_cell():
    here = {
        name
        for name, op in OPS.items()
        if op.implementations and any(implementations_here(op, args) for args in op.each_sample())
    }
    assert here - SHARED <= set(CELLS)


@pytest.mark.slow
def test_a_small_run_times_the_meaning_beside_each_implementation():
    result = bench(rounds=2, scale=0.001)
    found = {(t.op, t.case, t.by): t for t in result.timings}
    assert {op for op, _, _ in found} == set(CELLS)
    for (op, case, by), timing in found.items():
        meaning = found[op, case, "meaning"]
        assert timing.against_meaning == pytest.approx(meaning.sample.median / timing.sample.median)
        assert (by == "meaning") == (timing is meaning)
        assert by != READ or timing.flops_per_second == 0
        limit = getattr(result.limits, LIMIT_OF[timing.kind])
        rate = timing.flops_per_second if timing.kind == "compute" else timing.bytes_per_second
        assert timing.share == pytest.approx(rate / limit)
    assert ("linear_bf16", "1 token", READ) in found
    assert ("linear_bf16", "2048 tokens", READ) not in found
    assert table(result).row_count == len(result.timings)
    assert result.to_json()["timings"][0]["op"] == "experts_unfinalized"


@pytest.mark.parametrize("name", CELLS)
def test_bandwidth_cells_sweep_all_the_memory_they_count_without_meeting_any_twice(name):
    least = 1 << 22
    for cell in CELLS[name](least):
        assert isinstance(cell, Cell)
        both = name == "mla_write" or (name == "kda_prefill" and "token" in cell.case)
        assert (cell.kind == "read+write") == both
        if cell.kind != "compute":
            moved = cell.bytes / (2 if both else 1)
            assert moved >= least * 0.9
            assert len(cell.calls) > 1
            pieces = [tuple(x.tolist()) for x in places(name, cell)]
            assert len(set(pieces)) == len(pieces)


def places(name, cell):
    """What of its memory each call touches."""
    if name == "experts_unfinalized":
        return [args[1].flatten() for args in cell.calls]
    if name == "kda_prefill":
        return [args[6] for args in cell.calls]
    if name.startswith("mla"):
        return [args[2 if name in ("mla_attend_shard", "mla_write") else 3].flatten() for args in cell.calls]
    if name == "linear_bf16":
        return [args[1].flatten()[:8] for args in cell.calls]
    return [args[4][0, :1] for args in cell.calls]  # the first number of the matrix: all are drawn


def test_what_else_one_would_call_computes_the_same():
    cells = list(CELLS["linear_bf16"](1))
    assert {name for cell in cells for name in cell.rivals} >= {"bfloat16 linear", "bfloat16 mv"}
    for cell in cells:
        x, w = cell.calls[0]
        want = x.double() @ w.double().t()
        for rival in cell.rivals.values():
            assert (rival(x, w).view(want.shape).double() - want).abs().max() < 3e-2 * want.abs().max()


def test_a_replayed_sweep_makes_every_call_of_the_cell():
    cell = next(c for c in CELLS["linear_bf16"](1 << 16) if c.case == "1 token")
    if "native" not in implementations_here(OPS["linear_bf16"], cell.calls[0]):
        pytest.skip("no compiler")
    sweep = replayed(cell, "native")
    results = [
        next(t for t in r.kept if t.shape == (1, len(a[1]))) for r, a in zip(sweep.recordings, cell.calls)
    ]
    for t in results:
        t.fill_(float("nan"))
    sweep()
    assert len(results) == len(cell.calls) > 1
    assert all(torch.equal(t, torch.ops.k3.linear_bf16.native(*a)) for t, a in zip(results, cell.calls))


def test_a_busy_machine_is_said_to_be_one():
    limits = MachineLimits(2, 1e9, 1e9)
    assert not Result(limits, 0.4).disturbed
    assert Result(limits, 1.5).disturbed
    assert "others were running" in table(Result(limits, 1.5)).title
    assert os.getloadavg()


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="rounds and scale must be positive"):
        bench(rounds=0)
    with pytest.raises(ValueError, match="rounds and scale must be positive"):
        bench(scale=0)
    with pytest.raises(ValueError, match="no cell for rms_nrom; there are cells for"):
        bench(ops=["rms_nrom"])


def test_the_last_cache_is_the_largest_the_system_tells(tmp_path, monkeypatch):
    for i, size in enumerate(("32K", "1024K", "16M")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    assert kernels.last_cache() == 16 << 20
    monkeypatch.setattr(kernels, "CACHE", tmp_path / "none")
    assert kernels.last_cache() == kernels.ASSUMED_CACHE

"""The table and the JSON hold the same numbers, and every ratio is against plain Inductor of the same run."""

import io

import pytest
from rich.console import Console

from k3compile.bench.limits import MachineLimits, Sample
from k3compile.bench.model import ModelResult, ModeResult
from k3compile.bench.render import as_json, heading, table

LIMITS = MachineLimits(threads=2, bytes_per_second=20e9, flops_per_second=200e9)


def mode(name: str, prefill: float, decode: float) -> ModeResult:
    return ModeResult(
        mode=name,
        prefill=Sample((prefill,)),
        ttft=Sample((prefill, prefill * 2, prefill * 3)),
        decode=Sample((decode,)),
        host_per_layer=5e-4,
        peak_bytes=300_000_000,
        compile_seconds=1.5,
    )


RESULT = ModelResult(
    "small", 13, 100, 10**9, 4e10, 10**11, [mode("inductor", 2.0, 0.2), mode("k3", 1.0, 0.1)]
)


def text(result: ModelResult) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table(LIMITS, result))
    return out.getvalue()


def test_shares_are_of_the_limit_measured_in_the_same_run():
    (model,) = as_json(LIMITS, [RESULT])["models"]
    fast = model["modes"]["k3"]
    assert fast["decode_tokens_per_second"] == 10
    assert fast["decode_share_of_limit"] == pytest.approx(0.5)  # 1 GB in 0.1 s of 20 GB/s
    assert model["weights_read_bytes_per_second"] == 4e10
    assert fast["decode_share_of_weights_read"] == pytest.approx(0.25)
    assert fast["prefill_tokens_per_second"] == 100
    assert fast["prefill_share_of_limit"] == pytest.approx(0.5)
    assert fast["ttft_seconds"] == {"median": 2.0, "low": 1.5, "high": 2.5}


def test_the_table_shows_how_much_faster_than_plain_inductor():
    lines = [line for line in text(RESULT).splitlines() if " k3 " in line]
    assert len(lines) == 1
    assert lines[0].count("2.00x") == 2
    assert [word for word in lines[0].split() if word.endswith("%")] == ["50%", "50%", "25%"]


def test_the_plain_point_is_a_reference_too():
    modes = [mode("inductor", 2.0, 0.2), mode("plain", 4.0, 0.3), mode("k3", 1.0, 0.1)]
    (line,) = [
        s for s in text(ModelResult("small", 13, 100, 10**9, 4e10, 10**11, modes)).splitlines() if " k3 " in s
    ]
    assert [word for word in line.split() if word.endswith("x")] == ["2.00x", "2.00x", "4.00x", "3.00x"]


def test_without_the_reference_there_is_no_ratio():
    alone = ModelResult("small", 13, 100, 10**9, 4e10, 10**11, [mode("k3", 1.0, 0.1)])
    (line,) = [line for line in text(alone).splitlines() if " k3 " in line]
    assert "x" not in line.split("MB")[-1].replace("k3", "")


def test_the_heading_names_the_ceilings():
    assert "20.0 GB/s" in heading(LIMITS)
    assert "200 GFLOP/s" in heading(LIMITS)

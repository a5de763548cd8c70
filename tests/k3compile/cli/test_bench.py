"""`k3 bench model` from the command line."""

import json

import pytest
from k3compile.runtime.checkpoint import make_checkpoint
from typer.testing import CliRunner

from k3compile.cli.bench import app


@pytest.mark.slow
def test_bench_model_prints_json_for_programs():
    ran = CliRunner().invoke(
        app, ["model", "tiny", "--mode", "eager", "--prompt", "8", "--decode", "2", "--rounds", "2", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["limits"]["read_bytes_per_second"] > 0
    assert list(found["models"][0]["modes"]) == ["eager"]


def test_an_unknown_mode_is_misuse():
    ran = CliRunner().invoke(app, ["model", "tiny", "--mode", "fast"])
    assert ran.exit_code == 2
    assert "eager, inductor, plain, k3" in ran.output


def test_bench_hf_names_its_sizes():
    ran = CliRunner().invoke(app, ["hf", "--size", "huge"])
    assert ran.exit_code == 2
    assert "tiny, small, medium" in ran.output


def test_bench_speculate_counts_drafts_and_compares_throughput(tmp_path):
    make_checkpoint(tmp_path / "tiny", "tiny", 0)
    options = [
        "--no-compile",
        "--level",
        "1",
        "--rounds",
        "1",
        "--tokens",
        "4",
        "--num-drafts",
        "2",
        "--json",
    ]
    ran = CliRunner().invoke(app, ["speculate", str(tmp_path / "tiny"), *options])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert list(found["levels"]) == ["1"]
    assert found["mean_accepted_length"] >= 1


def test_bench_speculate_and_prefix_refuse_counts_below_one(tmp_path):
    make_checkpoint(tmp_path / "tiny", "tiny", 0)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        CliRunner().invoke(
            app, ["speculate", str(tmp_path / "tiny"), "--rounds", "0"], catch_exceptions=False
        )
    with pytest.raises(ValueError, match="turns must be at least 1, got 0"):
        CliRunner().invoke(app, ["prefix", "--turns", "0"], catch_exceptions=False)


@pytest.mark.slow
def test_bench_recall_prints_a_share_for_each_task(tmp_path):
    make_checkpoint(tmp_path / "tiny", "tiny", 0)
    ran = CliRunner().invoke(app, ["recall", str(tmp_path / "tiny"), "--problems", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == dict.fromkeys(("recall", "long", "copy", "sum", "facts", "tool"), 0.0)


def test_bench_kernels_draws_what_it_measured(tmp_path):
    picture = tmp_path / "kernels.svg"
    given = ["kernels", "--op", "kda_prefill", "--rounds", "1", "--scale", "0.001", "--plot", str(picture)]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert "kda_prefill: 1 row of one token" in picture.read_text()


def test_bench_kernels_prints_json_for_programs_and_names_its_ops():
    ran = CliRunner().invoke(
        app, ["kernels", "--op", "kda_prefill", "--rounds", "1", "--scale", "0.001", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["limits"]["bytes_per_second"] > 0
    assert {t["op"] for t in found["timings"]} == {"kda_prefill"}
    ran = CliRunner().invoke(app, ["kernels", "--op", "rms_nrom"])
    assert ran.exit_code == 2
    assert "there are cells for" in ran.output

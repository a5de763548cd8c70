"""`k3 bench model` from the command line."""

import json

import pytest
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
    assert "eager, inductor, k3" in ran.output


def test_bench_hf_names_its_sizes():
    ran = CliRunner().invoke(app, ["hf", "--size", "huge"])
    assert ran.exit_code == 2
    assert "tiny, small, medium" in ran.output

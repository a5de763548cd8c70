"""The compile benchmark: its shares and ratios, its budgets, and one real cold and warm start."""

import json

import pytest
from k3compile.runtime.presets import PRESETS, config_json
from typer.testing import CliRunner

from k3compile.bench import compile as bench
from k3compile.bench.compile import CompileResult, KindTimes, Round, check_reports, table
from k3compile.cli.main import app as k3


def kind(status, trace, passes, backend, name="kda+moe", remarks=7):
    return KindTimes(name, 3, status, trace, passes, backend, remarks)


def one(cold_backend=7.0, passes=0.5, warm_backend=0.25):
    cold = (kind("compiled", 1.0, passes, cold_backend), kind("compiled", 1.0, 0.1, 1.0, "mla+moe"))
    warm = (kind("cached", 1.0, 0.0, warm_backend), kind("cached", 0.5, 0.0, 0.125, "mla+moe"))
    return Round(cold, warm)


RESULT = CompileResult("tiny", (one(), one(cold_backend=17.0), one(passes=0.6, warm_backend=0.55)))


def test_shares_are_of_the_whole_compile_and_medians_over_rounds():
    assert [r.pass_share for r in RESULT.rounds] == pytest.approx([0.06, 0.03, 0.07])
    assert RESULT.pass_share == pytest.approx(0.06)
    assert [r.warm_ratio for r in RESULT.rounds] == pytest.approx([1.25, 1.25, 1.45])
    assert RESULT.warm_ratio == pytest.approx(1.25)
    assert RESULT.seconds("cold", "total") == pytest.approx(10.0)
    assert RESULT.seconds("cold", "backend", 1) == pytest.approx(1.0)
    assert json.loads(json.dumps(RESULT.to_json()))["rounds"][0]["warm"][1]["trace"] == 0.5


def test_only_budgets_that_are_given_and_exceeded_are_named():
    assert RESULT.over_budget(None, None) == []
    assert RESULT.over_budget(0.10, 1.5) == []
    assert RESULT.over_budget(0.05, 1.2) == [
        "passes take 6.0% of a cold compile, budget 5.0%",
        "a warm start takes 1.25x the trace, budget 1.20x",
    ]


def test_the_table_has_a_row_a_kind_and_one_for_all():
    made = table(RESULT)
    assert list(made.columns[0].cells) == ["kda+moe", "mla+moe", "all"]
    assert list(made.columns[1].cells) == ["3", "3", "6"]
    assert list(made.columns[6].cells) == ["6.2%", "5.0%", "6.0%"]
    assert list(made.columns[8].cells) == ["1.25x", "1.25x", "1.25x"]


@pytest.mark.parametrize("change", [{"status": "compiled"}, {"remarks": 0}])
def test_a_second_start_that_was_not_warm_is_an_error(change):
    cold = kind("compiled", 1.0, 0.5, 7.0)
    warm = kind(**({"status": "cached", "trace": 1.0, "passes": 0.0, "backend": 0.2} | change))
    with pytest.raises(RuntimeError, match=r"kda\+moe: the second start was"):
        check_reports(Round((cold,), (warm,)))
    check_reports(one())


def test_misuse_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        bench.bench("tiny", 0)
    ran = CliRunner().invoke(k3, ["bench", "compile", "--preset", "tinny"])
    assert ran.exit_code == 2
    assert "tiny-linear" in ran.output


@pytest.mark.parametrize(
    ("options", "code"), [([], 0), (["--max-pass-share", "0.05"], 1), (["--max-warm-ratio", "1.5"], 0)]
)
def test_the_exit_code_says_whether_a_given_budget_holds(options, code, monkeypatch):
    monkeypatch.setattr(bench, "bench", lambda target, rounds, say: RESULT)
    ran = CliRunner().invoke(k3, ["bench", "compile", *options])
    assert ran.exit_code == code
    assert "passes / cold 6.0%, warm / trace 1.25x" in ran.output
    ran = CliRunner().invoke(k3, ["bench", "compile", "--json", *options])
    assert ran.exit_code == code
    assert json.loads(ran.stdout)["pass_share"] == pytest.approx(0.06)


@pytest.mark.inductor
def test_a_real_model_of_one_layer_starts_cold_and_warm(tmp_path):
    config = config_json(PRESETS["tiny"])
    (tmp_path / "config.json").write_text(json.dumps(one_layer(config)))
    result = bench.bench(str(tmp_path), rounds=1)
    (cold,), (warm,) = result.rounds[0].cold, result.rounds[0].warm
    assert (cold.status, warm.status) == ("compiled", "cached")
    assert 0 < cold.passes < cold.backend
    assert cold.remarks > 10
    assert warm.backend < cold.backend / 2


def one_layer(config):
    """The first layer alone: KDA and a dense feed-forward."""
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 1
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": []}
    text["attn_res_block_size"] = 1
    return config

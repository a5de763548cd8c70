"""The benchmark of transformers' Kimi-Linear measures equal models and says what it cannot do."""

import sys

import pytest
import torch

from k3compile.bench import hf
from k3compile.bench.limits import Sample

SAMPLE = Sample((2.0, 4.0, 6.0))
RESULT = hf.Result(
    "tiny",
    4,
    70,
    1,
    (
        hf.ModeResult("eager", 0.0, SAMPLE, SAMPLE, 0.0),
        hf.ModeResult("k3", 9.0, Sample((1.0, 1.0, 1.0)), Sample((2.0, 2.0, 2.0)), 1e-6),
    ),
    {"adopted": (1, 2, 2, 2)},
)


def test_ratios_are_to_eager():
    made = RESULT.to_json()
    assert made["modes"]["k3"]["forward_speedup"] == 4.0
    assert made["modes"]["k3"]["decode_speedup"] == 2.0
    assert made["modes"]["eager"]["decode_speedup"] == 1.0
    assert made["lengths"] == (70, 75, 141, 210)
    assert hf.table(RESULT).row_count == 2
    assert hf.graphs_line(RESULT) == "graphs after prompts of 70, 75, 141, 210 tokens: adopted [1, 2, 2, 2]"


@pytest.mark.parametrize(
    ("given", "said"),
    [({"size": "huge"}, "sizes are tiny, small, medium"), ({"rounds": 0}, "rounds must be at least 1")],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        hf.bench(**given)


def test_without_transformers_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers with Kimi-Linear: pip install"):
        hf.bench()


@pytest.mark.oracle
def test_the_modes_have_the_same_weights_and_logits():
    pytest.importorskip("transformers", reason="transformers is what is measured")
    runs = [hf.Runs("eager", hf.make_model("tiny", 2), 9) for _ in range(2)]
    hf.adopt(runs[1].call)
    with torch.no_grad():
        a, b = (run.forward() for run in runs)
    assert (a - b).abs().max() < 1e-4
    for run in runs:
        run.warm_up()
    assert torch.equal(*(run.decode(3) for run in runs))
    assert runs[0].cache.get_seq_length() == 9 + 3 + 3


@pytest.mark.oracle
@pytest.mark.slow
def test_the_adopted_model_needs_two_graphs_for_any_length():
    pytest.importorskip("transformers", reason="transformers is what is measured")
    assert hf.graphs_over_lengths(9, ("adopted",)) == {"adopted": (1, 2, 2, 2)}

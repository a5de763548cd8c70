"""The picture of a benchmark shows every timing, as long as its share of the limit that bounds it."""

from xml.etree import ElementTree

import pytest

from k3compile.bench.kernels import Result, Timing
from k3compile.bench.limits import MachineLimits, Sample
from k3compile.bench.plot import FULL, LONGEST, OURS, RIVAL, svg

LIMITS = MachineLimits(2, 40e9, 200e9, 30e9)
SVG = "{http://www.w3.org/2000/svg}"


def timing(op, case, kind, by, share):
    return Timing(op, case, kind, by, Sample((1.0,)), 1.0, 1.0, share, 1.0)


RESULT = Result(
    LIMITS,
    0.0,
    [
        timing("experts", "1 token", "bandwidth", "meaning", 0.1),
        timing("experts", "1 token", "bandwidth", "native", 0.75),
        timing("linear", "a < b & c", "compute", "meaning", 0.5),
        timing("linear", "a < b & c", "compute", "bfloat16 mv", 3.0),
        timing("state", "1 row", "read+write", "native", 0.9),
    ],
)


def drawn(result):
    return ElementTree.fromstring(svg(result, frozenset({"native"})))


def test_a_bar_is_as_long_as_its_share():
    bars = [r for r in drawn(RESULT).iter(f"{SVG}rect") if r.get("class") == "bar"]
    shares = [float(b.get("width")) / FULL for b in bars]
    assert shares == pytest.approx([0.1, 0.75, 0.5, LONGEST, 0.9], abs=1e-3)
    assert [b.get("fill") for b in bars][1::2] == [OURS, RIVAL]


def test_every_cell_names_what_bounds_it():
    said = " ".join(t.text for t in drawn(RESULT).iter(f"{SVG}text"))
    for words in ("of 40.0 GB/s read", "of 200 GFLOP/s float32 matmul", "of 30.0 GB/s read and written"):
        assert words in said
    assert "linear: a < b & c" in said
    assert "300%" in said


def test_a_disturbed_run_says_so():
    assert "others were running" not in svg(RESULT, frozenset())
    assert "others were running" in svg(Result(LIMITS, 2.0, RESULT.timings), frozenset())

"""Two values are the same, or differ by rounding that is no larger than before, or they differ."""

import torch

from k3compile.difference import Compared, Observed, differences


def difference(want, got, reference):
    """What the comparison of single results says, or None."""
    runs = [Observed({"output 0": t}, frozenset()) for t in (want, got, reference)]
    return (
        "; ".join(differences([Compared(runs[0], runs[1], None if reference is None else runs[2])])) or None
    )


def test_rounding_may_be_nearer_to_float64_and_not_farther():
    x = torch.rand(64, 64).bfloat16()
    assert difference(x, x, None) is None
    reference = x.double() * (1 + 2.0**-9)
    slightly = (x.float() * (1 + 2.0**-9)).bfloat16()
    assert difference(x, slightly, reference) is None, "nearer to float64 than before"
    assert "from float64" in difference(x, x * 1.02, reference)
    assert difference(x, x * 1.02, None).startswith("output 0 was "), "without a reference every bit counts"


def test_few_rounding_errors_may_scatter_more_than_many():
    def verdict(count):
        x = torch.ones(count)
        worse = torch.full((count,), 1 + 13e-7)
        return difference(x + 10e-7, worse, x.double())

    assert verdict(32) is None
    assert "from float64" in verdict(4096)
    assert "from float64" in difference(torch.ones(4) + 1e-6, torch.ones(4) + 4e-6, torch.ones(4).double())


def test_nan_and_infinity_must_stand_where_they_stood():
    nan, inf = float("nan"), float("inf")
    assert difference(torch.tensor([nan, inf]), torch.tensor([nan, inf]), None) is None
    assert "elsewhere" in difference(torch.tensor([nan, 1.0]), torch.tensor([1.0, nan]), torch.ones(2))
    assert "elsewhere" in difference(torch.tensor([inf]), torch.tensor([-inf]), torch.ones(1))


def test_errors_of_several_runs_are_judged_together_and_all_else_run_by_run():
    def run(mine, theirs):
        x = torch.ones(64)
        return Compared(*(Observed({"y": t}, frozenset()) for t in (x + mine, x + theirs, x.double())))

    unlucky, lucky = run(1e-6, 3e-6), run(3e-6, 1e-6)
    assert "from float64, where" in differences([unlucky])[0]
    assert differences([unlucky, lucky]) == []
    assert "from float64 over 2 runs" in differences([unlucky, unlucky])[0]
    assert "NaN" in differences([lucky, run(0.0, torch.nan)])[0]


def test_memory_that_is_shared_before_or_after_only_is_named():
    x = torch.ones(2)
    apart = Observed({"output 0": x, "output 1": x}, frozenset())
    shared = Observed({"output 0": x, "output 1": x}, frozenset({("output 0", "output 1")}))
    assert differences([Compared(apart, shared)]) == ["output 0 and output 1 now share memory"]
    assert differences([Compared(shared, apart)]) == ["output 0 and output 1 no longer share memory"]

"""A configuration alone says what the passes do to its model."""

import pytest
from small_models import SMALL, SMALL_LINEAR

from k3compile.kinds import compile_kinds
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")


K3 = {"kda+dense+snapshot": 1, "kda+moe": 8, "kda+moe+snapshot": 1, "mla+moe": 4}
LINEAR = {"kda+dense": 1, "kda+moe": 2, "mla+moe": 2}


@pytest.mark.parametrize(
    ("config", "layers"),
    [pytest.param(SMALL, K3, marks=pytest.mark.slow), (SMALL_LINEAR, LINEAR)],
    ids=["k3", "kimi-linear"],
)
def test_every_kind_is_compiled_once_and_counted(config, layers):
    kinds = compile_kinds(config, CompileOptions(inner="aot_eager"))
    assert {k.name: k.layers for k in kinds} == layers
    assert all(k.report.applied("contiguous_views") == 8 for k in kinds if "kda" in k.name)
    assert len({k.report.key for k in kinds}) == len(kinds)

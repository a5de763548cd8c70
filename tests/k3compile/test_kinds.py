"""A configuration alone says what the passes do to its model."""

import pytest
from small_models import SMALL

from k3compile.kinds import compile_kinds
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")


def test_every_kind_is_compiled_once_and_counted():
    kinds = compile_kinds(SMALL, CompileOptions(inner="aot_eager"))
    assert {k.name: k.layers for k in kinds} == {
        "kda+dense+snapshot": 1,
        "kda+moe": 8,
        "kda+moe+snapshot": 1,
        "mla+moe": 4,
    }
    assert [k.report.applied("contiguous_views") for k in kinds if "kda" in k.name] == [8, 8, 8]
    assert len({k.report.key for k in kinds}) == 4

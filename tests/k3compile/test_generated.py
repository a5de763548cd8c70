"""Launches and allocations are those of the code that Inductor made, not of the graph it was given."""

import pytest
import torch

from k3compile import report
from k3compile.generated import called, counts

CODE = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        buf0 = empty_strided_cpu((5, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = empty_strided_cpu((5, 8), (8, 1), torch.float32)
        cpp_fused_mul_relu_0(buf0, buf1)
        buf2 = torch.ops.k3.short_conv.default(buf1, arg1_1)
        buf3 = reinterpret_tensor(buf2, (5, 4), (8, 1), 0)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        return (buf3, )
def get_args():
    return [empty_strided_cpu((5, 8), (8, 1), torch.float32)]
"""


def test_kernels_calls_and_allocations_are_told_apart():
    assert counts([CODE]) == {"launches": 3, "fused": 1, "calls": 2, "allocations": 2}


def test_only_the_function_that_runs_is_counted():
    assert list(called(CODE)).count("empty_strided_cpu") == 2


def test_no_code_has_no_counts():
    assert counts([]) == {}


@pytest.mark.inductor
def test_the_report_counts_what_was_generated_and_again_when_it_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def function(x, w):
        return torch.cat([(x @ w).relu() * 2, x]).sigmoid()

    for status in ("compiled", "cached"):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, backend="k3")(torch.randn(5, 8), torch.randn(8, 8))
        found = report.latest()
        assert found.status == status
        (code,) = found.generated
        assert code["calls"] == 1
        assert code["fused"] >= 1
        assert code["launches"] == code["fused"] + code["calls"]
        assert 2 <= code["allocations"] <= 3

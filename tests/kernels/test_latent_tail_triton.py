"""Finalize and the latent tail of one rank in Triton, interpreted: holes read nothing."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels.latent_tail_triton import objection, tail_objection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["finalize", "latent_tail"])
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def holes():
    """Rows that no index names, and the weights of holes, are NaN."""
    rows = torch.full((9, 72), torch.nan)
    rows[2:7, :24] = torch.randn(5, 24)
    idx = torch.tensor([[2, -1, 6], [-1, -1, -1], [3, 3, 5]], dtype=torch.int32)
    w = torch.where(idx < 0, torch.nan, torch.rand(3, 3))
    return rows[:, :24], w, idx


def test_a_hole_reads_neither_a_row_nor_its_weight():
    rows, w, idx = holes()
    (y,), _ = outcome_of("finalize", (rows, w, idx))
    assert torch.equal(y[1], torch.zeros(24))
    (want,), _ = meaning_of("finalize", (rows.nan_to_num(), w, idx))
    torch.testing.assert_close(y.double(), want, atol=1e-6, rtol=0)
    check_op("finalize", torch.float32, (rows, w, idx.to(torch.int64)))


def test_a_tail_of_holes_alone_is_the_shared_part():
    rows, w, idx = holes()
    shared = torch.randn(3, 16)
    args = (rows, w, idx, torch.randn(24), torch.randn(16, 24) * 0.2, shared, 1e-5, "")
    (out,), _ = check_op("latent_tail", torch.float32, args)
    assert torch.equal(out[1], shared[1])


def test_weights_and_indices_may_be_columns_of_wider_rows():
    rows, w, idx = (
        torch.randn(6, 24),
        torch.full((4, 8), torch.nan),
        torch.full((4, 8), 99, dtype=torch.int64),
    )
    w[:, 3:6], idx[:, 3:6] = torch.rand(4, 3), torch.randint(6, (4, 3))
    check_op("finalize", torch.float32, (rows, w[:, 3:6], idx[:, 3:6]))


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import latent_tail_triton

    rows, w, idx = holes()
    assert objection(rows, w, idx) == "cpu tensors"
    monkeypatch.setattr(latent_tail_triton, "no_gpu", lambda *tensors: None)
    assert objection(rows, w, idx) is None
    assert "side by side" in objection(rows, torch.rand(3, 3).t(), idx)
    rest = torch.randn(24), torch.randn(16, 24), torch.randn(3, 16), 1e-5
    assert tail_objection(rows, w, idx, *rest, "") is None
    assert tail_objection(rows, w, idx, *rest, "nobody") == "summed over ranks, by tiers"
    assert "differ" in tail_objection(rows.bfloat16(), w, idx, *rest, "")

"""The convolution of equally long sequences in Triton, interpreted: outputs, last windows, checkpoints."""

import pytest
import torch
from interpreted import check_samples, interpreted, meaning_of, outcome_of
from k3compile.kernels.conv_scan_triton import TOKENS, objection
from k3compile.kernels.jit_triton import recording
from k3compile.kernels.samples import Draw
from kda_rows import error_ratios, near

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@FLOATS
@pytest.mark.parametrize("name", ["conv_scan", "conv_scan_export"])
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def sequences(count, tokens, channels=24, dtype=torch.float32, seed=0):
    """Arguments of conv_scan with NaN before, behind and beside every token and window."""
    draw = Draw(dtype, seed)

    def among_nan(x):
        whole = x.new_full((count, x.shape[1] + 8, 3, channels), torch.nan)
        whole[:, 4:-4, 1] = x
        return whole[:, 4:-4, 1]

    x, initial = (among_nan(draw.normal(count, n, channels)) for n in (tokens, 3))
    return [x, draw.normal_acc(channels, 4), initial]


def turned(x):
    """The same values with the tokens of a channel side by side, the second of eight, among NaN."""
    whole = x.new_full((*x.shape[::2], x.shape[1] + 8), torch.nan)
    whole[..., 1 : 1 + x.shape[1]] = x.mT
    return whole.mT[:, 1 : 1 + x.shape[1]]


@FLOATS
@pytest.mark.parametrize(
    ("count", "tokens"), [(0, 5), (2, 0), (1, 1), (3, 2), (2, 3), (2, TOKENS), (2, TOKENS + 1), (1, 40)]
)
def test_sequences_come_out_as_the_meaning_says(count, tokens, dtype):
    args = sequences(count, tokens, dtype=dtype)
    (y, window), after = interpreted("k3compile.kernels.conv_triton", "conv_scan_triton", *args)
    (want, last), _ = meaning_of("conv_scan", args)
    near(y, want, 1e-6 if dtype == torch.float32 else 5e-3)
    assert torch.equal(window.double(), last), "raw rows are copied"
    assert window.dtype == dtype
    assert torch.equal(after[2], args[2]), "the window that came in was changed"


@pytest.mark.parametrize("tokens", [1, 2, 18])
@pytest.mark.parametrize("which", [(0,), (2,), (0, 2)], ids=str)
def test_tokens_side_by_side_are_taken_as_they_lie(which, tokens):
    args = sequences(2, tokens, channels=150)
    want, _ = outcome_of("conv_scan", args)
    for i in which:
        args[i] = turned(args[i])
    got, _ = outcome_of("conv_scan", args)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
        assert g.is_contiguous()


def test_sequences_may_share_their_rows():
    args = sequences(1, 7)
    want, _ = outcome_of("conv_scan", [torch.cat([args[0]] * 3), args[1], torch.cat([args[2]] * 3)])
    got, _ = outcome_of("conv_scan", [args[0].expand(3, -1, -1), args[1], args[2].expand(3, -1, -1)])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_window_keeps_its_own_dtype():
    x, weight, initial = sequences(2, 2, dtype=torch.bfloat16)
    initial = (initial.float() * 1.001).nan_to_num()  # no longer numbers of bfloat16
    (y, window), _ = outcome_of("conv_scan", [x, weight, initial])
    (want, last), _ = meaning_of("conv_scan", [x, weight, initial])
    assert (y.dtype, window.dtype) == (torch.bfloat16, torch.float32)
    near(y, want, 5e-3)
    assert torch.equal(window.double(), last)


@FLOATS
@pytest.mark.parametrize("offsets", [[3, 0], [5, 2, 0, 0], [1], [1, 1, 5]], ids=str)
def test_checkpoints_go_to_their_site_and_nowhere_else(offsets, dtype):
    args = sequences(2, 5, dtype=dtype)
    room = torch.full((3, 4, 5, 2, 24), torch.nan, dtype=dtype)
    pool = room[:, :, 1:4, 0]
    column = torch.tensor(offsets, dtype=torch.int32)
    (y, window), (left,) = outcome_of("conv_scan_export", [*args, column, pool, 1])
    (plain, last), _ = outcome_of("conv_scan", args)
    assert torch.equal(y, plain), "a checkpoint changed the outputs"
    assert torch.equal(window, last)
    for b, offset in enumerate(offsets[:2]):
        if offset:
            (_, want), _ = meaning_of("conv_scan", [args[0][b : b + 1, :offset], args[1], args[2][b : b + 1]])
            assert torch.equal(left[1, b].double(), want[0])
    others = [b for b in range(4) if b >= min(2, len(offsets)) or not offsets[b]]
    assert left[1, others].isnan().all()
    assert left[[0, 2]].isnan().all()
    after = left.as_strided(room.shape, room.stride(), 0)
    assert after[:, :, ::4].isnan().all(), "beside a window"
    assert after[:, :, :, 1].isnan().all(), "beside a row"


def test_a_sequence_without_an_entry_and_an_entry_without_a_place_leave_nothing():
    args, pool = sequences(3, 4), torch.full((1, 3, 3, 24), torch.nan)
    column = torch.tensor([2, 2, 2], dtype=torch.int32)
    for offsets, places in ((column[:1], pool), (column, pool[:, :1])):
        _, (left,) = outcome_of("conv_scan_export", [*args, offsets, places, 0])
        whole = left.as_strided(pool.shape, pool.stride(), 0)
        assert not whole[0, 0].isnan().any()
        assert whole[0, 1:].isnan().all()


def test_a_wrong_offset_leaves_no_checkpoint():
    args = sequences(2, 3)
    pool = torch.full((1, 2, 3, 24), torch.nan)
    _, (left,) = outcome_of("conv_scan_export", [*args, torch.tensor([4, -1], dtype=torch.int32), pool, 0])
    assert left.isnan().all()


@FLOATS
def test_errors_are_no_larger_than_the_meanings(dtype):
    calls = [sequences(2, 40, channels=64, dtype=dtype, seed=seed) for seed in range(4)]
    assert max(error_ratios("conv_scan", calls)) <= 1.1


def test_a_long_prompt_is_addressed_by_64_bits():
    """What is passed on needs more than 32 bits, so the kernel may not multiply it before it widens."""
    from k3compile.kernels.conv_triton import conv_scan_triton

    x = torch.empty(1, 600_000, 2 * 4608, device="meta")[..., :4608]
    assert x.stride(1) * x.shape[1] > 1 << 32
    with recording("sm_90") as made:
        conv_scan_triton(x, torch.empty(4608, 4, device="meta"), torch.empty(1, 3, 4608, device="meta"))
    assert made.launches[0].grid == (600_000 // TOKENS + 1, 36, 1)


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import conv_scan_triton

    args = sequences(1, 2)
    more = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, 3, 24), 0]
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(conv_scan_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert objection(*args, *more) is None
    assert objection(turned(args[0]), args[1], turned(args[2])) is None
    assert "float64" in objection(args[0].double(), *args[1:])
    assert "float64" in objection(*args, more[0], more[1].double(), 0)
    assert "x has rows that do not start" in objection(args[0][..., 1:], *args[1:])
    assert "initial has rows that do not start" in objection(*args[:2], args[2][..., 1:])
    assert "weight has elements 24 apart" in objection(args[0], args[1].t().contiguous().t(), args[2])
    assert "pool has elements 3 apart" in objection(*args, more[0], more[1].mT.contiguous().mT, 0)
    assert "pool has rows that do not start" in objection(*args, more[0], more[1][..., 1:], 0)
    assert "export_offset has elements 2 apart" in objection(*args, torch.zeros(4).int()[::2], *more[1:])

"""KDA under speculation in Triton, interpreted: drafts leave states alone, and commits take some of them."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels.kda_verify_triton import commit_objection
from kda_rows import error_ratios, near, poisoned, untouched

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@FLOATS
@pytest.mark.parametrize("name", ["kda_verify", "kda_verify_into", "kda_commit"])
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def drafts(lengths, recorded=9, **how):
    """Arguments of kda_verify with records of NaN."""
    args = poisoned(lengths, **how)
    state = args[5]
    slots, heads, values, keys = state.shape
    room = (slots, recorded, heads)
    u, g = (torch.full((*room, n), torch.nan) for n in (values, keys))
    return [*args, u, torch.full((*room, keys), torch.nan, dtype=args[1].dtype), g]


@FLOATS
def test_a_state_is_only_read_and_only_its_records_are_written(dtype):
    args = drafts([4, 0, 1, 9], dtype=dtype, heads=2)
    (got,), records = outcome_of("kda_verify", args)
    (want,), expected = meaning_of("kda_verify", args)
    assert torch.equal(got[14:], torch.zeros_like(got[14:]))
    near(got[:14], want[:14], 1e-6 if dtype == torch.float32 else 5e-3)
    for record, wanted in zip(records, expected):
        assert torch.equal(record.isnan(), wanted.isnan()), "other records were written, or too few"
        near(record.nan_to_num(), wanted.nan_to_num(), 1e-6)
    assert torch.equal(records[1][args[6][3], :9], args[1][5:14]), "keys are recorded as they are"
    assert torch.equal(records[2][args[6][3], :9], args[3][5:14]), "decays are recorded as they are"


def test_more_tokens_than_records_are_computed_and_not_recorded():
    args = drafts([6], recorded=4)
    (got,), records = outcome_of("kda_verify", args)
    (want,), _ = meaning_of("kda_prefill", args[:8])
    near(got[:6], want[:6], 1e-6)
    assert all(not record[args[6][0]].isnan().any() for record in records)
    assert all(record[[s for s in range(7) if s != args[6][0]]].isnan().all() for record in records)


def pools(slots=8, recorded=5, layers=(), heads=2, keys=16, values=8, seed=0, channels=20):
    """What kda_commit is given but its rows: states and windows with gaps of NaN, records."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*layers, *shape, generator=source)

    state = torch.full((*layers, slots, 2, heads, values, keys), torch.nan)
    window = torch.full((*layers, slots, 2, 3, channels), torch.nan)
    at = (slice(None),) * len(layers)
    state[(*at, slice(None), 0)] = normal(slots, heads, values, keys)
    window[(*at, slice(None), 0)] = normal(slots, 3, channels)
    k = torch.nn.functional.normalize(normal(slots, recorded, heads, keys), dim=-1)
    g = -5.0 * torch.rand(*layers, slots, recorded, heads, keys, generator=source) ** 2
    held = state[(*at, slice(None), 0)], window[(*at, slice(None), 0)]
    return [*held, normal(slots, recorded, heads, values), k, g, normal(slots, recorded, channels)]


def commit(pool, *rows):
    """Arguments for rows of (slot, accepted, into)."""
    return [*pool, *(torch.tensor(column) for column in zip(*rows))]


@pytest.mark.parametrize(
    "rows",
    [
        [(3, 2, 3)],
        [(3, 0, 3), (1, 5, 1)],
        [(3, 4, 6), (3, 5, 3)],  # a block boundary after the fourth, and the rest in place
        [(3, 5, 3), (3, 2, 6)],  # in place is last whatever the order
        [(5, 1, 5), (2, 3, 7), (2, 0, 4), (2, 5, 2)],
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [(), (2,)], ids=["one", "two"])
def test_what_was_accepted_goes_where_it_should_and_nowhere_else(rows, layers):
    args = commit(pools(layers=layers), *rows)
    _, left = outcome_of("kda_commit", args)
    _, want = meaning_of("kda_commit", args)
    places = {into for _, _, into in rows}
    for pool, wanted, before in zip(left, want, args):
        for layer in range(layers[0] if layers else 1):
            got, expected, old = (p[layer] if layers else p for p in (pool, wanted, before))
            near(got, expected, 1e-6)
            others = [s for s in range(8) if s not in places]
            assert torch.equal(got[others], old[others])
            untouched(got, range(8))


def test_a_commit_is_a_run_that_only_saw_what_was_accepted():
    args = drafts([5], past=0)
    _, records = outcome_of("kda_verify", args)
    pool = [args[5], torch.randn(7, 3, 8), *records, torch.randn(7, 9, 8)]
    home = int(args[6][0])
    _, (state, _) = outcome_of("kda_commit", commit(pool, (home, 3, home)))
    cut = [x[:3] for x in args[:5]]
    _, (want,) = meaning_of("kda_prefill", [*cut, args[5], args[6], torch.tensor([0, 3])])
    near(state[home], want[home], 1e-6)


@pytest.mark.parametrize(
    "row", [(3, 6, 3), (3, -1, 3), (3, 2, 8), (3, 2, -1), (9, 2, 4), (-1, 2, 4)], ids=str
)
def test_a_row_that_cannot_be_changes_nothing(row):
    args = commit(pools(), row)
    _, left = outcome_of("kda_commit", args)
    for pool, before in zip(left, args):
        assert torch.equal(pool, before)


@FLOATS
def test_errors_are_no_larger_than_the_meanings(dtype):
    verified, committed = [], []
    for seed in range(4):
        args = drafts([8, 5], dtype=dtype, past=0, seed=seed, keys=32)
        verified.append([*args[:5], args[5].nan_to_num(), *args[6:8], *(r.nan_to_num() for r in args[8:])])
        committed.append(commit(pools(seed=seed, recorded=8), (1, 8, 1), (2, 5, 6)))
    assert max(error_ratios("kda_verify", verified)) <= 1.1
    assert max(error_ratios("kda_commit", committed)) <= 1.1


def test_bfloat16_windows_and_records():
    args = commit(pools(), (3, 2, 3))
    for i in (1, 3, 5):
        args[i] = args[i].bfloat16()
    check_op("kda_commit", torch.bfloat16, args)


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import kda_verify_triton

    args = commit(pools(channels=24), (1, 2, 1))
    assert commit_objection(*args) == "cpu tensors"
    monkeypatch.setattr(kda_verify_triton, "no_gpu", lambda *tensors: None)
    assert commit_objection(*args) is None
    assert "float64" in commit_objection(args[0].double(), *args[1:])
    assert "bfloat16 where kernels take float32" in commit_objection(*args[:2], args[2].bfloat16(), *args[3:])
    assert "window has elements" in commit_objection(args[0], args[1].mT.contiguous().mT, *args[2:])

"""The batch form of KDA against a token-by-token recurrence, and its exports against shorter runs."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from kda_oracle import case, recurrence, worst

k3 = torch.ops.k3


def batch(tokens, count=2, dtype=torch.float64):
    """Sequences of equal length, and the arguments of kda_scan for them."""
    rows = [case(tokens, seed) for seed in range(count)]
    return rows, [torch.stack(parts).to(dtype) for parts in zip(*rows)]


def cut(args, tokens):
    return [x[:, :tokens] for x in args[:5]] + [args[5]]


def pool_for(args, sites=3, more=1):
    """A pool of NaN, so that what was not written shows."""
    initial = args[5]
    return torch.full((sites, len(initial) + more, *initial.shape[1:]), torch.nan, dtype=initial.dtype)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 130])
def test_every_sequence_equals_the_recurrence(tokens, dtype, bound):
    rows, args = batch(tokens, 3, dtype)
    out, final = k3.kda_scan(*args)
    for b, row in enumerate(rows):
        o, s = recurrence(row)
        assert worst(out[b], o) < bound
        assert worst(final[b], s) < bound


def test_what_came_in_is_left_alone():
    _, args = batch(70)
    before = [x.clone() for x in args]
    _, final = k3.kda_scan(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, before))
    assert not torch.equal(final, args[5])


def test_no_tokens_hand_the_state_back():
    _, args = batch(0)
    out, final = k3.kda_scan(*args)
    assert out.shape == args[2].shape
    assert torch.equal(final, args[5])


def test_token_after_token_equals_one_run():
    _, args = batch(20)
    want, last = k3.kda_scan(*args)
    state, outs = args[5], []
    for t in range(20):
        o, state = k3.kda_scan(*(x[:, t : t + 1] for x in args[:5]), state)
        outs.append(o)
    assert worst(torch.cat(outs, 1), want) < 1e-12
    assert worst(state, last) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("m", [64, 128, 192])
def test_an_export_on_the_grid_has_the_bits_of_a_run_that_stops_there(m, dtype):
    _, args = batch(200, 2, dtype)
    pool = pool_for(args)
    out, final = k3.kda_scan_export(*args, offsets(m, m, 0), pool, 1)
    assert all(torch.equal(x, y) for x, y in zip((out, final), k3.kda_scan(*args)))
    assert torch.equal(pool[1, :2], k3.kda_scan(*cut(args, m))[1])
    assert torch.isnan(pool[[0, 2]]).all()
    assert torch.isnan(pool[1, 2]).all()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_exports_off_the_grid_differ_by_sequence(dtype, bound):
    rows, args = batch(140, 4, dtype)
    pool = pool_for(args, 1, 0)
    places = [1, 0, 77, 140]
    out, _ = k3.kda_scan_export(*args, offsets(*places), pool, 0)
    assert torch.equal(out, k3.kda_scan(*args)[0])
    for b, m in enumerate(places):
        if m:
            _, want = recurrence(
                rows[b]._replace(**{n: getattr(rows[b], n)[:m] for n in rows[b]._fields[:5]})
            )
            assert worst(pool[0, b], want) < bound
        else:
            assert torch.isnan(pool[0, b]).all()


def test_going_on_from_an_export_gives_the_same_outputs():
    _, args = batch(150)
    pool = pool_for(args, 1, 0)
    want, last = k3.kda_scan_export(*args, offsets(64, 64), pool, 0)
    out, final = k3.kda_scan(*(x[:, 64:] for x in args[:5]), pool[0])
    assert worst(out, want[:, 64:]) < 1e-12
    assert worst(final, last) < 1e-12


@pytest.mark.parametrize("offset", [-1, 71])
def test_an_offset_outside_the_sequence_is_refused(offset):
    _, args = batch(70)
    pool = pool_for(args)
    with pytest.raises(ValueError, match=f"export_offset of row 1 is {offset}; the row has 70 tokens"):
        k3.kda_scan_export(*args, offsets(64, offset), pool, 0)
    assert torch.isnan(pool).all()

"""Rows for KDA kernels among NaN: nothing but the rows themselves and their slots holds a number."""

import torch
from interpreted import flat, meaning_of, outcome_of, written
from k3compile.kernels import OPS
from k3compile.kernels.samples import Draw, row_bounds


def poisoned(lengths, heads=1, keys=16, values=8, slots=7, past=3, dtype=torch.float32, steep=5.0, seed=0):
    """Arguments of kda_prefill, cut from wider rows, rows of nobody at the end and gaps between slots."""
    draw, tokens = Draw(dtype, seed), sum(lengths)

    def rows(*shape, like, wide=dtype):
        whole = torch.full((tokens + past, 2, *shape), torch.nan, dtype=wide)
        whole[:tokens, 1] = like
        return whole[:, 1]

    q, k = (rows(heads, keys, like=draw.unit(tokens, heads, keys) * n) for n in (keys**-0.5, 1.0))
    v = rows(heads, values, like=draw.normal(tokens, heads, values))
    decays = -steep * draw.fraction(tokens, heads, keys) ** 2
    g = rows(heads, keys, like=decays, wide=draw.wide)
    beta = rows(heads, like=draw.fraction(tokens, heads), wide=draw.wide)
    state = torch.full((slots, 2, heads, values, keys), torch.nan)
    places = draw.choice(len(lengths), slots)
    state[places, 0] = draw.normal_acc(len(lengths), heads, values, keys)
    return [q, k, v, g, beta, state[:, 0], places, row_bounds(lengths)]


def check(name, args, more=(), bound=1e-6):
    """One call of op ``name`` on such arguments: its rows, its slots and ``more``, and nothing else."""
    (got,), (left, *_) = outcome_of(name, args)
    (want,), (stepped, *_) = meaning_of(name, args)
    tokens, slots = int(args[7][-1]), [*args[6].tolist(), *more]
    assert torch.equal(got[tokens:], torch.zeros_like(got[tokens:])), "rows of nobody are zero"
    near(got[:tokens], want[:tokens], bound)
    near(left[slots], stepped[slots], bound)
    untouched(left, slots)
    return got, left


def near(got, want, bound):
    """Within ``bound`` of the largest value."""
    if got.numel():
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error <= bound, f"off by {error:.3g} of the largest value"


def untouched(pool, slots):
    """Whatever of a pool with gaps is not in these slots is NaN still."""
    others = [s for s in range(len(pool)) if s not in slots]
    assert pool[others].isnan().all(), "another slot was written"
    gaps = pool.as_strided(pool.shape, pool.stride(), pool[0].numel())
    assert gaps.isnan().all(), "the memory between slots was written"


def error_ratios(name, calls):
    """For each result of an op, the error of its kernel over that of its meaning at the same dtype, all calls
    together: root mean squares, against float64.
    """
    sums = {}
    for args in calls:
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        returned = flat(OPS[name].meaning(*own))
        got, want = (
            ([*results, *left]) for results, left in (outcome_of(name, args), meaning_of(name, args))
        )
        for i, (g, o, w) in enumerate(zip(got, [*returned, *written(name, own)], want, strict=True)):
            kernel, meaning = sums.get(i, (0.0, 0.0))
            sums[i] = kernel + squares(g, w), meaning + squares(o, w)
    return [(kernel / meaning) ** 0.5 if meaning else float(kernel > 0) for kernel, meaning in sums.values()]


def squares(got, want):
    return float((got.double() - want).square().sum())

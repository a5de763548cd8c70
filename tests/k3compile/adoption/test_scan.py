"""What the adopted functions share: raw queries and keys, a batch or packed sequences, a state or none."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from kda_oracle import case, recurrence, worst

from k3compile.adoption.scan import refuse, scan, wants_gradient


def batch(tokens, count=2):
    rows = [case(tokens, seed) for seed in range(count)]
    return rows, [torch.stack(parts) for parts in zip(*rows)]


@pytest.mark.parametrize("tokens", [1, 70])
def test_queries_and_keys_are_normalised_and_scaled_on_request(tokens):
    rows, (q, k, v, g, beta, state) = batch(tokens)
    want = [recurrence(row) for row in rows]
    scale = q.shape[-1] ** -0.5
    for given in ((q / scale, k, False), (7 * q, 3 * k, True)):
        o, final = scan(given[0], given[1], v, g, beta, scale, given[2], state)
        bound = 1e-10 if not given[2] else 1e-4  # the norm has 1e-6 inside its root
        assert max(worst(o[b], want[b][0]) for b in range(2)) < bound
        assert max(worst(final[b], want[b][1]) for b in range(2)) < bound


def test_no_state_is_a_state_of_zeros():
    _, (q, k, v, g, beta, state) = batch(5)
    fresh = scan(q, k, v, g, beta, 1.0, True, None)
    zeros = scan(q, k, v, g, beta, 1.0, True, torch.zeros_like(state))
    assert all(torch.equal(a, b) for a, b in zip(fresh, zeros))


def test_packed_sequences_are_kept_apart():
    lengths = [3, 0, 70, 1]
    rows = [case(n, seed) for seed, n in enumerate(lengths)]
    q, k, v, g, beta = (torch.cat(parts)[None] for parts in list(zip(*rows))[:5])
    state = torch.stack([row.state for row in rows])
    before, cu = state.clone(), torch.tensor([0, 3, 3, 73, 74])
    o, final = scan(q, k, v, g, beta, 1.0, False, state, cu)
    for r, row in enumerate(rows):
        want, last = recurrence(row)
        assert worst(o[0, cu[r] : cu[r + 1]], want) < 1e-10
        assert worst(final[r], last) < 1e-10
    assert torch.equal(state, before), "the caller's state is his"


def test_a_gradient_is_wanted_only_where_autograd_records():
    x = torch.ones(2, requires_grad=True)
    assert wants_gradient(None, x)
    assert not wants_gradient(x.detach(), 3, None)
    with torch.no_grad():
        assert not wants_gradient(x)


def test_a_refusal_names_the_function_and_the_way_back():
    assert "chunk_kda: a thing is not computed by k3 ops; k3compile.unadopt(model)" in str(
        refuse("chunk_kda", "a thing")
    )

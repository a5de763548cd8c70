"""Each part is looked for behind the one before it; the first that is missing is named."""

import pytest
import torch
from k3compile.passes.finalize import finalize_at
from k3compile.passes.latent_tail_parts import Stopped, Tail, grow
from latent_tails import built_in, linear, make_args, select, tail
from traced import traced


def grown(fn, *args):
    """The tail of the one finalize in ``fn`` and what stopped it."""
    graph, prover = traced(fn, *args, symbolic=False)
    (found,) = [f for n in graph.nodes if n.op == "call_function" and (f := finalize_at(n, prover))]
    made = Tail(found, found.result, list(found.nodes))
    try:
        grow(made, prover)
    except Stopped as stopped:
        return made, stopped.reason
    return made, None


def test_a_whole_tail_has_every_part():
    made, stopped = grown(tail(select), *make_args())
    assert stopped is None
    assert made.parts == ("finalize", "norm", "up projection", "shared expert")
    assert (made.up.op, made.shared.op, made.norm.weight.op) == ("placeholder",) * 3
    assert len(set(made.nodes)) == len(made.nodes)


STOPS = {
    "finalize": (lambda r, w, i, n, u, s: select(r, w, i).relu(), "no RMS norm follows the weighted sum"),
    "norm": (
        lambda r, w, i, n, u, s: built_in(select(r, w, i), n).relu(),
        "no up projection follows the norm",
    ),
    "up projection": (
        lambda r, w, i, n, u, s: linear(built_in(select(r, w, i), n), u).relu(),
        "no shared expert is added",
    ),
}


@pytest.mark.parametrize("last", STOPS)
def test_it_says_how_far_it_came(last):
    fn, reason = STOPS[last]
    made, stopped = grown(fn, *make_args())
    assert made.parts[-1] == last
    assert stopped.startswith(reason)


def test_the_layout_of_the_weight_is_read():
    for up, transposed in ((linear, False), (lambda y, w: y @ w, True)):
        args = make_args(latent=24, width=24)
        made, _ = grown(tail(select, built_in, up), *args)
        assert made.up_is_transposed == transposed


def test_a_number_is_no_shared_expert():
    made, stopped = grown(
        lambda r, w, i, n, u, s: linear(built_in(select(r, w, i), n), u) + 1.0, *make_args()
    )
    assert "not another tensor" in stopped
    assert torch.is_tensor(made.end.meta["val"])

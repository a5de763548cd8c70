"""A finalize and the tail behind it become one op, in every spelling; another order of things is refused."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels.latent_tail import latent_tail
from k3compile.passes import latent_tail_parts
from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.latent_tail import LATENT_TAIL
from k3compile.runtime.parallel.ranks import group
from latent_tails import (
    EPS,
    NORMS,
    UPS,
    WHOLE,
    WITH_HOLES,
    ZEROED,
    built_in,
    fancy,
    float64,
    hugging_face,
    linear,
    make_args,
    reduce,
    select,
    tail,
    where_after,
)
from torch.nn import functional as F

PASSES = (CANONICALIZE, LATENT_TAIL)
SLOWLY = [False, pytest.param(True, marks=pytest.mark.slow)]  # decomposed graphs differ in a few names


def compiled(fn, *calls, **options):
    made = Compiled(fn, PASSES, **options)
    results = [made(*args) for args in calls]
    return made, results


def remarks(made, kind=None):
    return made.remarks(kind, "latent_tail")


def reasons(fn, args, **options):
    made, _ = compiled(fn, args, **options)
    assert "k3.latent_tail.default" not in made.targets()
    return [r.reason for r in remarks(made, "missed")]


def assert_one_op(made):
    (remark,) = remarks(made)
    assert remark.kind == "applied", remark
    left = [t for t in made.targets() if t.split(".")[0] in ("aten", "prims", "k3", "_c10d_functional")]
    views = ("aten.view", "aten.t.", "aten.permute", "aten.clone", "aten.transpose")
    assert [t for t in left if not t.startswith(views)] == ["k3.latent_tail.default"]
    return remark


def the_op(made):
    target = torch.ops.k3.latent_tail.default
    (call,) = made.graphs[-1].graph.find_nodes(op="call_function", target=target)
    return call


@pytest.mark.parametrize("decompose", SLOWLY, ids=["plain", "decomposed"])
@pytest.mark.parametrize("finalize", WHOLE, ids=lambda f: f.__name__)
def test_every_spelling_of_the_finalize_is_found(finalize, decompose):
    args = make_args(torch.float64)
    made, (got,) = compiled(tail(finalize), args, decompose=decompose)
    torch.testing.assert_close(got, tail(finalize)(*args), rtol=1e-12, atol=1e-12)
    (remark,) = remarks(made)
    assert remark.kind == "applied", remark
    assert "k3.latent_tail.default" in made.targets()
    assert not any(t.startswith(("aten.sum", "aten.bmm", "aten.mm", "aten.index")) for t in made.targets())


@pytest.mark.parametrize("finalize", WITH_HOLES, ids=lambda f: f.__name__)
def test_dropped_holes_are_holes_of_the_op_and_unread_rows_may_hold_anything(finalize):
    args = make_args(torch.float64, holes=True, poison=True)
    made, (got,) = compiled(tail(finalize), args)
    assert torch.isfinite(got).all()
    want = torch.ops.k3.latent_tail(*args, EPS, "")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert [r.kind for r in remarks(made)] == ["applied"]
    assert "holes dropped" in remarks(made)[0].detail


@pytest.mark.parametrize("finalize", ZEROED, ids=lambda f: f.__name__)
def test_holes_that_are_multiplied_away_still_read_row_0(finalize):
    rows, *rest = make_args(torch.float64, holes=True)
    args = (rows, *rest)
    made, (got,) = compiled(tail(finalize), args)
    torch.testing.assert_close(got, tail(finalize)(*args), rtol=1e-12, atol=1e-12)
    assert "k3.latent_tail.default" in made.targets()
    rows[0] = torch.nan
    assert torch.equal(made(*args).isnan(), tail(finalize)(*args).isnan()), "NaN spreads as it did"


def test_a_negative_index_that_counts_from_the_end_still_does():
    args = make_args(torch.float64, holes=True)
    made, (got,) = compiled(tail(fancy), args)
    torch.testing.assert_close(got, tail(fancy)(*args), rtol=1e-12, atol=1e-12)
    assert "k3.latent_tail.default" in made.targets()


@pytest.mark.parametrize("decompose", SLOWLY, ids=["plain", "decomposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_every_spelling_of_the_norm_is_found(norm, dtype, decompose):
    args = make_args(dtype)
    made, (got,) = compiled(tail(where_after, norm), args, decompose=decompose)
    assert_one_op(made)
    bound = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(got, tail(where_after, norm)(*args), rtol=bound, atol=bound)


@pytest.mark.parametrize("up", UPS, ids=lambda f: f.__name__)
def test_the_weight_may_stand_either_way(up):
    args = make_args(torch.float64)
    made, (got,) = compiled(tail(select, built_in, up), args)
    torch.testing.assert_close(got, tail(select, built_in, up)(*args), rtol=1e-12, atol=1e-12)
    assert_one_op(made)


def test_a_weight_of_another_dtype_is_handed_over_as_it_is():
    args = make_args(torch.float32)
    args = args._replace(up_w=args.up_w.bfloat16())
    made, _ = compiled(tail(select), args)
    assert_one_op(made)
    assert the_op(made).args[4].meta["val"].dtype == torch.bfloat16


def test_the_shared_expert_may_stand_on_either_side():
    def forward(rows, w, idx, norm_w, up_w, shared):
        return shared + linear(built_in(select(rows, w, idx), norm_w), up_w)

    made, _ = compiled(forward, make_args())
    assert_one_op(made)


def test_one_graph_serves_every_number_of_tokens():
    calls = [make_args(torch.float64, tokens, holes=tokens > 1) for tokens in (4, 1, 7, 64)]

    def forward(rows, w, idx, norm_w, up_w, shared):
        torch._check(w.shape[0] == idx.shape[0])
        torch._check(shared.shape[0] == idx.shape[0])
        return tail(where_after)(rows, w, idx, norm_w, up_w, shared)

    names = "L['rows']:0,L['w']:0,L['idx']:0,L['shared']:0"
    made, results = compiled(forward, *calls, unbacked=names)
    for args, got in zip(calls, results):
        torch.testing.assert_close(got, tail(where_after)(*args), rtol=1e-12, atol=1e-12)
    assert len(made.graphs) == 1
    assert [r.kind for r in remarks(made)] == ["applied"]


def test_what_it_saves_is_expected_in_the_remark():
    made, _ = compiled(tail(select), make_args(tokens=5, top_k=2, latent=24, width=16))
    expected = assert_one_op(made).expected
    kernels = ["index_select", "mul", "sum", "pow", "mean", "add", "rsqrt", "mul", "mul", "mm", "add"]
    assert expected["launches"] == 1 - len(kernels)
    assert expected["allocations"] == 1 - len(kernels)
    between = 2 * 5 * 2 * 24 + 5 * 24 + 5 * 24 + 3 * 5 + 2 * 5 * 24 + 5 * 16
    assert expected["bytes"] == str(-2 * 4 * between)


# -- refused -----------------------------------------------------------------------------------------------


def test_a_norm_before_the_sum_over_ranks_is_refused(lone_group):
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = reduce(built_in(select(rows, w, idx), norm_w), lone_group)
        return linear(y, up_w) + reduce(shared, lone_group)

    made, _ = compiled(forward, make_args())
    (remark,) = remarks(made)
    assert remark.kind == "missed"
    assert "the norm comes before the sum over ranks" in remark.reason
    assert "then take its norm" in remark.fix_it
    assert remark.detail.startswith("closest: finalize, norm;")


def test_the_shared_expert_added_before_the_sum_over_ranks_is_refused(lone_group):
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = reduce(select(rows, w, idx) + shared, lone_group)
        return linear(built_in(y, norm_w), up_w)

    args = make_args(latent=16, width=16)
    assert "added before the sum over ranks" in reasons(forward, args)[0]


def test_a_sum_over_ranks_after_the_up_projection_is_refused(lone_group):
    def forward(rows, w, idx, norm_w, up_w, shared):
        return reduce(linear(built_in(select(rows, w, idx), norm_w), up_w), lone_group) + shared

    (reason,) = reasons(forward, make_args())
    assert reason == "the result of the up projection is summed over ranks once more"


@pytest.mark.parametrize("place", ["sum", "norm", "product", "up", "chosen"])
def test_a_second_reader_is_named(place):
    def forward(rows, w, idx, norm_w, up_w, shared):
        chosen = rows.index_select(0, idx.view(-1))
        weighed = chosen.view(*idx.shape, -1) * w[..., None]
        y = weighed.sum(1)
        unit = torch.ops.k3.rms_norm(y, norm_w, EPS)
        up = linear(unit, up_w)
        seen = {"chosen": chosen, "product": weighed, "sum": y, "norm": unit, "up": up}[place]
        return up + shared, seen.relu()

    (reason,) = reasons(forward, make_args())
    assert "has another reader: aten.relu relu" in reason


def test_a_result_that_is_returned_too_is_a_second_reader():
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = select(rows, w, idx)
        return linear(built_in(y, norm_w), up_w) + shared, y

    assert "has another reader: the graph's output" in reasons(forward, make_args())[0]


def test_top_k_on_another_axis_is_refused():
    def finalize(rows, w, idx):  # rows are weighed and summed over tokens
        return (rows[idx] * w[..., None]).sum(0)

    args = make_args(tokens=3, top_k=3)
    assert "top-k is not the last dimension" in reasons(tail(finalize), args)[0]


def test_a_bias_is_refused():
    def forward(rows, w, idx, norm_w, up_w, shared):
        return F.linear(built_in(select(rows, w, idx), norm_w), up_w, norm_w[:16]) + shared

    assert "has a bias" in reasons(forward, make_args())[0]


def test_something_broadcast_is_no_shared_expert():
    def forward(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(select(rows, w, idx), norm_w), up_w) + shared[0]

    assert "is broadcast over the rows" in reasons(forward, make_args())[0]


def test_router_weights_of_fewer_bits_are_refused():
    def finalize(rows, w, idx):
        return (rows[idx] * w.bfloat16()[..., None]).sum(1)

    (reason,) = reasons(tail(finalize), make_args(torch.bfloat16))
    assert reason == "router weights are bfloat16 and the sum is kept in float32"


def test_rows_that_are_weighed_twice_are_refused():
    def by_tensor(rows, w, idx):
        return (rows[idx] * w[..., None] * w.sum(1, keepdim=True)[..., None]).sum(1)

    def by_number(rows, w, idx):
        return (rows[idx] * w[..., None] * 2.5).sum(1)

    assert "weighed twice" in reasons(tail(by_tensor), make_args())[0]
    assert "weighed twice" in reasons(tail(by_number), make_args())[0]


def test_weights_that_are_not_one_for_each_choice_are_refused():
    def finalize(rows, w, idx):
        return (rows[idx] * w[:, :1, None]).sum(1)

    assert "not one for each token and choice" in reasons(tail(finalize), make_args())[0]


def test_rows_added_at_tokens_nobody_knows_are_refused():
    def finalize(rows, w, idx):
        token = idx.flatten().argsort() // idx.shape[1]
        return torch.zeros(idx.shape[0], rows.shape[1]).index_add(0, token, rows[: w.numel()] * w.view(-1, 1))

    made, _ = compiled(tail(finalize), make_args())
    (remark,) = remarks(made)
    assert "which token a row is added to is not known" in remark.reason
    assert "repeat_interleave" in remark.fix_it


def test_a_mask_that_is_not_the_sign_of_the_index_is_refused():
    def by_weight(rows, w, idx):
        weighed = rows[idx.clamp(min=0)] * w[..., None]
        return torch.where((w > 0.5)[..., None], weighed, 0.0).sum(1)

    def by_minus_one(rows, w, idx):
        weighed = rows[idx.clamp(min=0)] * w[..., None]
        return torch.where((idx != -1)[..., None], weighed, 0.0).sum(1)

    assert "something else than the sign" in reasons(tail(by_weight), make_args())[0]
    assert "tests for -1 alone" in reasons(tail(by_minus_one), make_args())[0]


def test_a_mask_that_keeps_the_holes_is_refused():
    def finalize(rows, w, idx):
        weighed = rows[idx.clamp(min=0)] * w[..., None]
        return torch.where((idx < 0)[..., None], weighed, 0.0).sum(1)

    assert "keeps the holes" in reasons(tail(finalize), make_args())[0]


def test_rounding_to_fewer_bits_than_the_model_has_is_refused():
    def finalize(rows, w, idx):
        return select(rows, w, idx).half().float()

    assert "is float16, the experts' rows are float32" in reasons(tail(finalize), make_args())[0]


def test_a_mixture_without_a_latent_reports_what_stands_there_instead():
    def forward(rows, w, idx, shared):
        return select(rows, w, idx) + shared

    rows, w, idx, _, _, shared = make_args(latent=16, width=16)
    (reason,) = reasons(forward, (rows, w, idx, shared))
    assert reason.startswith("no norm follows the weighted sum: aten.add")


def test_other_weighted_sums_are_no_candidates():
    def pool(x, scores):
        return (x * scores.softmax(1).unsqueeze(-1)).sum(1), x.sum(1), torch.bmm(x, x.mT)

    made, _ = compiled(pool, (torch.randn(4, 3, 8), torch.randn(4, 3)))
    assert {r.kind for r in remarks(made)} <= {"note"}


def test_rows_that_stand_in_order_need_no_index():
    def forward(rows, w, norm_w, up_w, shared):
        y = (rows.view(*w.shape, -1) * w[..., None]).sum(1)
        return linear(built_in(y, norm_w), up_w) + shared

    rows, w, _, *rest = make_args(torch.float64)
    args = (rows[: w.numel()], w, *rest)
    made, (got,) = compiled(forward, args)
    torch.testing.assert_close(got, forward(*args), rtol=1e-12, atol=1e-12)
    assert "k3.latent_tail.default" in made.targets()


def test_no_fuel_leaves_the_graph_as_it_is():
    made, _ = compiled(tail(select), make_args(), veto=lambda name: name == "latent_tail")
    assert [r.reason for r in remarks(made)] == ["stopped by fuel or by the bisector"]
    assert "k3.latent_tail.default" not in made.targets()


# -- groups ------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch, lone_group):
    """A name that the pass takes for a group of two, and on which one process can run."""
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda group: 2)
    return lone_group


def test_a_group_of_one_rank_sends_nothing(lone_group):
    made, (got,) = compiled(tail(select, group=lone_group), args := make_args(torch.float64))
    remark = assert_one_op(made)
    assert remark.expected["all_reduces"] == -2
    assert the_op(made).args[-1] == ""
    torch.testing.assert_close(got, tail(select)(*args), rtol=1e-12, atol=1e-12)


def test_the_op_takes_over_both_sums_over_ranks(two_ranks):
    made, (got,) = compiled(tail(select, group=two_ranks), args := make_args(torch.float64))
    remark = assert_one_op(made)
    assert "all_reduces" not in remark.expected
    assert f"summed over group {two_ranks}" in remark.detail
    assert the_op(made).args[-1] == two_ranks
    torch.testing.assert_close(got, tail(select)(*args), rtol=1e-12, atol=1e-12)


def test_a_shared_expert_that_every_rank_has_whole_is_refused(two_ranks):
    def forward(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(reduce(select(rows, w, idx), two_ranks), norm_w), up_w) + shared

    made, _ = compiled(forward, make_args())
    (remark,) = remarks(made)
    assert "is not summed over ranks and the latent is" in remark.reason
    assert remark.detail.startswith("closest: finalize, sum over ranks, norm, up projection;")


def test_a_shared_expert_that_was_summed_already_stays_so(two_ranks):
    def forward(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(select(rows, w, idx), norm_w), up_w) + reduce(shared, two_ranks)

    made, _ = compiled(forward, make_args())
    assert "_c10d_functional.all_reduce.default" in made.targets()
    assert "k3.latent_tail.default" in made.targets()


def test_another_reduction_than_a_sum_is_refused(two_ranks):
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = select(rows, w, idx)
        y = torch.ops._c10d_functional.all_reduce(y, "max", two_ranks)
        y = torch.ops._c10d_functional.wait_tensor(y)
        return linear(built_in(y, norm_w), up_w) + reduce(shared, two_ranks)

    assert reasons(forward, make_args()) == ["the partial sums are reduced by max, not by sum"]


def test_different_groups_are_refused(two_ranks):
    other = torch.distributed.new_group([0], group_desc="another").group_name

    def forward(rows, w, idx, norm_w, up_w, shared):
        y = reduce(select(rows, w, idx), two_ranks)
        return linear(built_in(y, norm_w), up_w) + reduce(shared, other)

    (reason,) = reasons(forward, make_args())
    assert f"summed over group {two_ranks} and the shared expert by sum over group {other}" in reason


def test_more_bytes_over_ranks_than_the_op_sends_are_refused(two_ranks):
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = (rows[idx].float() * w[..., None]).sum(1)
        y = reduce(y, two_ranks).bfloat16()
        return linear(built_in(y, norm_w), up_w) + reduce(shared, two_ranks)

    (reason,) = reasons(forward, make_args(torch.bfloat16))
    assert reason == "float32 is summed over ranks, the experts' rows are bfloat16"


# -- accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [latent_tail.meaning, latent_tail.open_form], ids=["meaning", "opened"])
@pytest.mark.parametrize("norm", [built_in, hugging_face], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_against_float64_is_at_most_that_of_the_parts(form, norm, dtype):
    for tokens in (0, 1, 7, 64):
        for top_k in (1, 2, 8):
            ours, theirs, bound = 0.0, 0.0, 1.1
            for seed in range(4):
                args = make_args(dtype, tokens, top_k, 64, 48, holes=top_k > 1, poison=True, seed=seed)
                exact = tail(where_after, norm)(*float64(args))
                got, parts = form(*args, EPS, ""), tail(where_after, norm)(*args)
                assert torch.isfinite(got).all()
                ours += (got.double() - exact).square().sum().item()
                theirs += (parts.double() - exact).square().sum().item()
            assert ours**0.5 <= bound * theirs**0.5, (tokens, top_k)


def test_in_float64_the_op_is_its_parts():
    for tokens in (0, 1, 7, 64):
        for top_k in (1, 2, 8):
            args = make_args(torch.float64, tokens, top_k, holes=top_k > 1, poison=True)
            got, want = torch.ops.k3.latent_tail(*args, EPS, ""), tail(where_after)(*args)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.fixture
def lone_group():
    return group()

"""Programs that are almost a latent tail, or one in an odd layout, give what eager gives in any case."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes import latent_tail_parts
from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.finalize import finalize_at
from k3compile.passes.graph import emit
from k3compile.passes.latent_tail import LATENT_TAIL, check_writes
from k3compile.passes.latent_tail_parts import Stopped, Tail, grow
from k3compile.runtime.parallel.ranks import group
from lanes import thinned
from latent_tails import EPS, built_in, fancy, linear, make_args, reduce, select, tail, where_after
from traced import traced


def scattered(token, weighed=lambda rows, w, idx: rows[idx.view(-1)] * w.view(-1, 1)):
    """index_add at the tokens that ``token(T, k)`` makes."""

    def finalize(rows, w, idx):
        zeros = torch.zeros(len(idx), rows.shape[1], dtype=w.dtype)
        return zeros.index_add(0, token(*idx.shape), weighed(rows, w, idx))

    return tail(finalize)


def clamped_first(rows, w, idx):
    """The clamp is taken of the index as it is kept, [k, T]."""
    weighed = rows[idx.clamp(min=0).t()] * w[..., None]
    return torch.where((idx.t() >= 0)[..., None], weighed, 0.0).sum(1)


def dropped_by_another(rows, w, idx):
    weighed = rows[idx.clamp(min=0)] * w[..., None]
    return torch.where((idx.t() >= 0)[..., None], weighed, 0.0).sum(1)


def zeroed(rows, w, idx):
    here = (idx >= 0).t().to(w.dtype)
    return (rows[idx.clamp(min=0).t()] * w[..., None] * here[..., None]).sum(1)


def dropped_before_weighing(rows, w, idx):
    return (torch.where((idx < 0)[..., None], 0.0, rows[idx.clamp_min(0)]) * w[..., None]).sum(1)


def dropped_after_weighing(rows, w, idx):
    at = idx.view(-1)
    return torch.where((at >= 0)[:, None], rows[at.clamp(min=0)] * w.view(-1, 1), 0.0)


def not_of_a_number(rows, w, idx):
    everything = ~(idx >= 0).long()  # -1 and -2: both true
    weighed = rows[idx.clamp(min=0)] * w[..., None]
    return torch.where(everything.bool()[..., None], 0.0, weighed).sum(1)


def of_four_dimensions(rows, w, idx):
    return (rows[: idx.numel()].view(1, *idx.shape, -1).relu().squeeze(0) * w[..., None]).sum(1)


def with_index(change, finalize=select):
    return lambda rows, w, idx, *rest: tail(finalize)(rows, w, change(idx), *rest)


def with_weights(up=lambda w: w, norm=lambda w: w):
    def forward(rows, w, idx, norm_w, up_w, shared):
        y = select(rows, w, idx)
        unit = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return linear(unit * norm(norm_w), up(up_w)) + shared

    return forward


def times_itself(rows, w, idx, norm_w, up_w, shared):
    y = built_in(select(rows, w, idx), norm_w)
    return torch.mm(y, y) + shared


SQUARE = {"tokens": 3, "top_k": 3}
KEPT_BY_CHOICE = {"tokens": 6, "top_k": 2, "by_choice": True}
HOLES = {"holes": True}
ROWS_AS_TOKENS = {"tokens": 6, "top_k": 3}
PROGRAMS = {  # name -> (program, arguments, whether it is a latent tail)
    "index kept by choice": (with_index(lambda i: i.t(), fancy), KEPT_BY_CHOICE, True),
    "as many tokens as choices": (with_index(lambda i: i.t(), fancy), SQUARE, True),
    "holes kept by choice": (
        with_index(lambda i: i.t().contiguous(), where_after),
        KEPT_BY_CHOICE | HOLES,
        True,
    ),
    "clamped before it is turned": (tail(clamped_first), KEPT_BY_CHOICE | HOLES, False),
    "zeroed by choice": (tail(zeroed), KEPT_BY_CHOICE | HOLES, True),
    "zeroed, as many tokens as choices": (tail(zeroed), SQUARE | HOLES, True),
    "holes of another order than the index": (tail(dropped_by_another), SQUARE | HOLES, False),
    "index of floats": (with_index(lambda i: (i.double() / 1.3).long()), {}, True),
    "index of bool": (with_index(lambda i: (i > 4).long()), {}, True),
    "index of few bits": (with_index(lambda i: (i + 250).to(torch.uint8).long() % 13), {}, True),
    "holes that few bits hide": (
        with_index(lambda i: i.to(torch.uint8).int() % 13, where_after),
        HOLES,
        True,
    ),
    "tokens counted in another order": (
        scattered(lambda t, k: torch.arange(t * k).view(k, t).t().reshape(-1) // k),
        ROWS_AS_TOKENS,
        False,
    ),
    "tokens counted over and over": (scattered(lambda t, k: torch.arange(t).repeat(k)), SQUARE, False),
    "tokens counted in few bits": (
        scattered(lambda t, k: torch.arange(t).to(torch.uint8).long().repeat_interleave(k)),
        {"tokens": 300, "top_k": 1},
        False,
    ),
    "dropped before they are added": (
        scattered(lambda t, k: torch.arange(t).repeat_interleave(k), dropped_after_weighing),
        HOLES | {"poison": True},
        True,
    ),
    "holes of any weight": (tail(dropped_before_weighing), HOLES | {"not_finite": True}, False),
    "masks that are numbers": (tail(not_of_a_number), HOLES, False),
    "rows of four dimensions": (tail(of_four_dimensions), ROWS_AS_TOKENS, True),
    "a weight of whole numbers": (with_weights(up=lambda w: (9 * w).int().to(w.dtype)), {}, True),
    "a weight of fewer bits": (with_weights(up=lambda w: w.to(torch.bfloat16).to(w.dtype)), {}, True),
    "a gain of whole numbers": (with_weights(norm=lambda w: (3 * w).int().to(w.dtype)), {}, True),
    "a result of another layout": (
        lambda r, w, i, n, u, shared: shared.t() + linear(built_in(select(r, w, i), n), u),
        {"tokens": 16},
        False,
    ),
    "a value times itself": (times_itself, {"tokens": 24, "width": 24}, False),
}


@pytest.mark.parametrize("name", thinned(PROGRAMS, 8))
def test_whatever_becomes_of_it_the_result_is_that_of_eager(name):
    program, options, applied = PROGRAMS[name]
    options = dict(options)
    by_choice, not_finite = options.pop("by_choice", False), options.pop("not_finite", False)
    args = make_args(torch.float64, **options)
    if by_choice:
        args = args._replace(idx=args.idx.t().contiguous())
    if not_finite:
        args.w[args.idx < 0] = torch.inf
    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    got, want = made(*args), program(*args)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert got.stride() == want.stride()
    assert ("k3.latent_tail.default" in made.targets()) == applied, made.remarks(None, "latent_tail")


def test_router_weights_kept_by_choice_are_read_as_they_stand():
    args = make_args(torch.float64, tokens=6, top_k=2)
    args = args._replace(w=args.w.t().contiguous())

    def program(rows, w, *rest):
        return tail(select)(rows, w.t(), *rest)

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    torch.testing.assert_close(made(*args), program(*args), rtol=1e-12, atol=1e-12)
    assert "k3.latent_tail.default" in made.targets()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shown", [False, True], ids=["read once", "read twice"])
def test_casts_of_the_shared_experts_sum_are_taken_only_where_nobody_else_reads_them(
    monkeypatch, ranks, shown
):
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda name: ranks)
    name = group()

    def program(rows, w, idx, norm_w, up_w, shared):
        up = linear(built_in(reduce(select(rows, w, idx), name), norm_w), up_w)
        wide = reduce(shared, name).float()
        out = (up.float() + wide).to(up.dtype)
        return (out, wide) if shown else out

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    args = make_args(torch.bfloat16)
    for got, want in zip(made(*args), program(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    (remark,) = made.remarks(None, "latent_tail")
    assert remark.kind == ("missed" if shown and ranks > 1 else remark.kind)
    assert remark.kind == "applied" or "another reader" in remark.reason or "float32" in remark.reason


def test_a_sum_of_the_shared_expert_that_was_rounded_twice_stays_so(monkeypatch):
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda name: 2)
    name = group()

    def program(rows, w, idx, norm_w, up_w, shared):
        rounded = reduce(shared, name).to(torch.float32).to(torch.float64)
        return linear(built_in(reduce(select(rows, w, idx), name), norm_w), up_w) + rounded

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    args = make_args(torch.float64)
    torch.testing.assert_close(made(*args), program(*args), rtol=1e-12, atol=1e-12)
    assert [r.kind for r in made.remarks(None, "latent_tail")] == ["missed"]


def test_what_the_op_would_read_must_not_be_written_on_the_way():
    graph, prover = traced(tail(select), *make_args(), symbolic=False)
    (found,) = [f for n in graph.nodes if n.op == "call_function" and (f := finalize_at(n, prover))]
    made = Tail(found, found.result, list(found.nodes))
    grow(made, prover)
    check_writes(made)
    with graph.inserting_before(made.norm.result):  # a graph that was not made functional may have it
        emit(graph, torch.ops.aten.mul_.Tensor, (found.rows, 2), like=made.end, mode=None)
    with pytest.raises(Stopped, match="writes to what the tail reads"):
        check_writes(made)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_reader_of_what_is_sent_to_other_ranks_is_named(monkeypatch, ranks):
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda name: ranks)
    name = group()

    def program(rows, w, idx, norm_w, up_w, shared):
        y = select(rows, w, idx)
        return linear(built_in(reduce(y, name), norm_w), up_w) + reduce(shared, name), y

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    made(*make_args(torch.float64))
    (remark,) = made.remarks(None, "latent_tail")
    assert remark.kind == "missed"
    assert "has another reader: the graph's output" in remark.reason


def test_the_shared_experts_sum_over_more_ranks_than_the_latents_stays(monkeypatch):
    lone, other = group(), torch.distributed.new_group([0], group_desc="more ranks").group_name
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda name: 1 if name == lone else 2)

    def program(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(reduce(select(rows, w, idx), lone), norm_w), up_w) + reduce(shared, other)

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    made(*make_args(torch.float64))
    sums = made.graphs[-1].graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce.default
    )
    assert [node.args[2] for node in sums] == [other]
    assert "k3.latent_tail.default" in made.targets()


def test_a_sum_over_ranks_that_is_waited_for_twice_is_left(monkeypatch):
    monkeypatch.setattr(latent_tail_parts, "ranks_of", lambda name: 2)
    name, ops = group(), torch.ops._c10d_functional

    def program(rows, w, idx, norm_w, up_w, shared):
        sent = ops.all_reduce(select(rows, w, idx), "sum", name)
        y, again = ops.wait_tensor(sent), ops.wait_tensor(sent)
        return linear(built_in(y, norm_w), up_w) + reduce(shared, name), again + 1

    made = Compiled(program, (CANONICALIZE, LATENT_TAIL))
    made(*make_args(torch.float64))
    (remark,) = made.remarks(None, "latent_tail")
    assert "has another reader than one wait_tensor" in remark.reason

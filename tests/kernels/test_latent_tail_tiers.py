"""All tiers give what one rank gives, the same bits on all of them; two read only a part of the weight."""

import pytest
import torch
import torch.distributed as dist
from k3compile.kernels.latent_tail import latent_tail, normed
from k3compile.kernels.latent_tail_tiers import FUSED_TOKENS, OVERLAP_TOKENS
from k3compile.kernels.latent_tail_tiers import tier as tier_of
from k3compile.kernels.latent_tail_traffic import COLLECTIVES
from latent_tails import EPS, k3_norm, make_args, part, summed, tail, where_after
from threaded_ranks import on_threads
from torch.utils._python_dispatch import TorchDispatchMode

TIERS = ("fused", "overlap", "column")
ALL = ("tiers", *TIERS)
k3 = torch.ops.k3


def group():
    return dist.group.WORLD.group_name


def run(tier, ranks, whole):
    """The result of every rank, and the exact one of one rank."""
    parts = [part(whole, rank, ranks) for rank in range(ranks)]
    compute = getattr(k3.latent_tail, tier)
    exact = latent_tail.meaning(*summed(parts), EPS, "")
    return on_threads(ranks, lambda rank: compute(*parts[rank], EPS, group())), exact


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("tokens", [0, 1, 7, FUSED_TOKENS + 1, OVERLAP_TOKENS + 1])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tier", ALL)
def test_in_float64_ranks_give_what_one_rank_gives(tier, ranks, tokens):
    whole = make_args(torch.float64, tokens, top_k=4, width=32, holes=tokens > 1, poison=True)
    results, exact = run(tier, ranks, whole)
    for got in results:
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
        assert torch.equal(got, results[0]), "the same bits on every rank"
        assert got.stride() == (32, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_the_error_is_that_of_the_layer_as_it_is_written(tier, dtype):
    whole = make_args(dtype, tokens=48, top_k=4, latent=96, width=64)
    results, exact = run(tier, 4, whole)
    plain = on_threads(4, lambda rank: tail(where_after, k3_norm, group=group())(*part(whole, rank, 4)))
    assert len({r.double().sum().item() for r in results}) == 1
    assert error(results[0], exact) <= 1.1 * error(plain[0], exact)


def test_bfloat16_is_rounded_where_the_layer_is_rounded():
    """Bit for bit as a layer whose norm rounds once; columns alone keep their product until it is added."""
    whole = make_args(torch.bfloat16, tokens=48, top_k=4, latent=96, width=64)

    def once(y, w):
        return normed(y.float(), w, EPS).to(y.dtype)

    plain = on_threads(2, lambda rank: tail(where_after, once, group=group())(*part(whole, rank, 2)))
    for tier in ("overlap", "fused"):
        assert torch.equal(run(tier, 2, whole)[0][0], plain[0])
    assert not torch.equal(run("column", 2, whole)[0][0], plain[0])


@pytest.mark.parametrize("tier", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout_of_the_arguments_gives_the_same(tier, dtype):
    whole = make_args(dtype, tokens=6, top_k=3)
    strided = whole._replace(
        rows=torch.cat([whole.rows, whole.rows], 1)[:, :24],  # trimmed from padding
        up_w=whole.up_w.t().contiguous().t(),
        shared=torch.stack([whole.shared, whole.shared], 2)[..., 0],
    )
    assert not any(t.is_contiguous() for t in (strided.rows, strided.up_w, strided.shared))

    def work(rank, given):
        before = given.shared.clone()
        got = getattr(k3.latent_tail, tier)(*given, EPS, group())
        assert torch.equal(given.shared, before), "the shared part is not written"
        return got

    for a, b in zip(on_threads(2, lambda r: work(r, strided)), on_threads(2, lambda r: work(r, whole))):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("tier", ALL)
def test_a_rank_without_rows_only_has_its_shared_part(tier):
    whole = make_args(torch.float64, tokens=3)

    def work(rank):
        rows, w, idx, *rest = part(whole, rank, 2)
        nothing = rank == 1
        given = (rows[:0], w, torch.full_like(idx, -1)) if nothing else (whole.rows, w, whole.idx)
        return getattr(k3.latent_tail, tier)(*given, *rest, EPS, group())

    want = latent_tail.meaning(*whole, EPS, "")
    torch.testing.assert_close(on_threads(2, work)[1], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tier", TIERS)
def test_what_every_rank_has_whole_would_count_once_a_rank(tier, ranks):
    """The op's shared part is partial: that is why the pass refuses a replicated one."""
    whole = make_args(torch.float64)
    whole = whole._replace(rows=torch.zeros_like(whole.rows))
    got = on_threads(ranks, lambda rank: getattr(k3.latent_tail, tier)(*whole, EPS, group()))
    torch.testing.assert_close(got[0], ranks * whole.shared)


def test_the_tier_goes_by_the_number_of_rows():
    assert [tier_of(n) for n in (0, 1, 128, 129, 256, 257, 8192)] == [
        *["fused"] * 3,
        *["overlap"] * 2,
        *["column"] * 2,
    ]


@pytest.mark.parametrize("tokens", [FUSED_TOKENS, OVERLAP_TOKENS, OVERLAP_TOKENS + 1])
def test_of_all_tiers_that_of_the_row_count_runs(tokens):
    whole = make_args(torch.float32, tokens)
    seen = on_threads(2, lambda rank: calls_of("tiers", part(whole, rank, 2))[0])
    alone = on_threads(2, lambda rank: calls_of(tier_of(tokens), part(whole, rank, 2))[0])
    assert seen == alone


# -- what is sent and read ---------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Collectives that are started, with their operands' bytes, and the bytes of ``weight`` that ops read."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.started, self.read = weight, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.started.append((func._schema.name.split("::")[1], args[0].nbytes))
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            memory = self.weight.untyped_storage().data_ptr()
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.read += sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() == memory)
        return result


def calls_of(tier, args):
    """Collectives of a call, and the bytes of its weight that were read."""
    body = latent_tail.implementations[tier].fn if tier != "default" else latent_tail.meaning
    with Counting(args.up_w) as counted:
        body(*args, EPS, group())
    return counted.started, counted.read


@pytest.mark.parametrize("resident", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tier", "parts"), [("fused", 4), ("column", 4), ("overlap", 1)])
def test_a_rank_reads_its_part_of_the_weight(tier, parts, resident):
    whole = make_args(torch.float32)
    whole = whole._replace(up_w=whole.up_w.to(resident))
    for _, read in on_threads(4, lambda rank: calls_of(tier, part(whole, rank, 4))):
        assert read == whole.up_w.nbytes / parts


@pytest.mark.parametrize("tokens", [5, FUSED_TOKENS + 1, OVERLAP_TOKENS + 1])
@pytest.mark.parametrize("tier", ["default", *ALL])
def test_what_it_declares_to_send_and_read_is_what_it_sends_and_reads(tier, tokens):
    whole = make_args(torch.bfloat16, tokens)

    def work(rank):
        args = part(whole, rank, 4)
        declared = COLLECTIVES[f"latent_tail.{tier}"](*args, EPS, group())
        return declared, calls_of(tier, args)

    for declared, (started, read) in on_threads(4, work):
        for_these = next(t for t in declared if t.up_to is None or tokens <= t.up_to)
        assert (len(started), sum(n for _, n in started)) == (for_these.collectives, for_these.sent)
        assert read == for_these.weight


@pytest.mark.parametrize(("form", "second"), [("overlap", "all_reduce"), ("fused", "reduce_scatter_tensor")])
def test_both_sums_are_on_their_way_before_the_first_is_waited_for(form, second):
    class Order(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "_c10d_functional":
                self.seen += (func._schema.name.split("::")[1],)
            return func(*args, **(kwargs or {}))

    def work(rank):
        with Order() as order:
            latent_tail.implementations[form].fn(*part(make_args(), rank, 2), EPS, group())
        return order.seen

    assert on_threads(2, work)[0][:2] == ("all_reduce_", second)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an op gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_many_rows_are_weighed_choice_by_choice():
    whole = make_args(tokens=9, top_k=8, latent=24, width=16)

    def work(rank):
        with Largest() as largest:
            latent_tail.implementations["column"].fn(*whole, EPS, group())
        return largest.numel

    assert on_threads(2, work) == [9 * 24] * 2, "and not [T, k, L]"


# -- refused -----------------------------------------------------------------------------------------------


def objections(ranks, width=16):
    (*args,) = make_args(width=width)
    every = latent_tail.implementations.values()
    return on_threads(ranks, lambda rank: {i.provider: i.objection(*args, EPS, group()) for i in every})[0]


def test_a_width_that_does_not_divide_is_left_to_overlap():
    why = "a width of 16 does not divide by 3 ranks"
    found = objections(3)
    assert {tier: found[tier] for tier in ALL} == {"tiers": why, "fused": why, "column": why, "overlap": None}
    whole = make_args(torch.float64)
    results, exact = run("overlap", 3, whole)
    torch.testing.assert_close(results[2], exact, rtol=1e-12, atol=1e-12)


def test_one_rank_has_no_tiers():
    found = objections(1)
    assert {found[tier] for tier in ALL} == {"nothing is summed over ranks"}
    args = make_args()
    without = {latent_tail.implementations[t].objection(*args, EPS, "") for t in ALL}
    assert without == {"nothing is summed over ranks"}
    unknown = latent_tail.implementations["tiers"].objection(*args, EPS, "nobody")
    assert unknown == "no process group is called nobody"


def test_the_tiers_come_first_where_there_are_several_ranks():
    fitting = [provider for provider, why in objections(2).items() if why is None]
    assert fitting[0] == "tiers"

"""Over several ranks the op of the tail stays one node, and what computes it goes by the number of rows."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.latent_tail import LATENT_TAIL
from k3compile.passes.lower import Lower
from k3compile.passes.snapshot import digest, snapshot, text
from latent_tails import built_in, k3_norm, linear, make_args, reduce, select, tail, where_after
from pretended_group import pretended_group
from torch._inductor.decomposition import select_decomp_table

BY_ROWS = "tier by token count: fused <= 128, overlap <= 256, column beyond"
COLLECTIVES = "_c10d_functional."


def lowered(name, fn=None, args=None, **how):
    made = Compiled(fn or tail(where_after, k3_norm, group=name), (CANONICALIZE, LATENT_TAIL, Lower(**how)))
    made(*(args or make_args()))
    return made


def said(made):
    (remark,) = [r for r in made.remarks(None, "lower") if r.op.startswith("k3.latent_tail")]
    return remark


@pytest.mark.parametrize("fuses", [False, True], ids=["plain", "fuses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
def test_several_ranks_have_one_opaque_op_and_its_tier_is_said(ranks, dtype, fuses):
    with pretended_group(ranks) as name:
        made = lowered(name, args=make_args(dtype), fuses=fuses)
    remark = said(made)
    assert (remark.kind, remark.reason) == ("applied", f"computed by tiers, {BY_ROWS}")
    assert remark.detail == "cpu, triton: summed over ranks, by tiers; symm: cpu tensors"
    assert "k3.latent_tail.tiers" in made.targets()
    assert not any(t.startswith(COLLECTIVES) for t in made.targets())


def test_a_graph_is_the_same_on_every_rank():
    found = set()
    for rank in (0, 3, 7):
        with pretended_group(8, rank) as name:
            after = snapshot(lowered(name).graphs[-1])
            found.add((digest(after), text(after)))
    assert len(found) == 1


def test_a_width_that_does_not_divide_is_reported_and_left_to_overlap():
    with pretended_group(3) as name:
        made = lowered(name)
        remark = said(made)
    assert remark.reason == "computed by overlap"
    assert "tiers, fused, column: a width of 16 does not divide by 3 ranks" in remark.detail
    assert "k3.latent_tail.overlap" in made.targets()


def test_one_rank_has_no_tiers_and_its_op_is_opened():
    with pretended_group(1) as name:
        made = lowered(name, args=make_args(torch.bfloat16), fuses=True, table=select_decomp_table())
    remark = said(made)
    assert remark.reason == "opened"
    assert "tiers, overlap, fused, column: nothing is summed over ranks" in remark.detail
    assert not any(t.startswith(("k3.", COLLECTIVES)) for t in made.targets())


@pytest.mark.parametrize("tier", ["tiers", "fused", "overlap", "column"])
def test_a_tier_that_is_named_is_obeyed(tier):
    with pretended_group(2) as name:
        made = lowered(name, providers={"latent_tail": tier}, fuses=True)
    assert f"k3.latent_tail.{tier}" in made.targets()


def test_the_meaning_and_the_opened_form_can_be_named_too():
    with pretended_group(2) as name:
        assert "k3.latent_tail.default" in lowered(name, providers={"latent_tail": "meaning"}).targets()
        opened = lowered(name, providers={"latent_tail": "open"}, table=select_decomp_table())
    assert not any(t.startswith("k3.latent_tail") for t in opened.targets())
    assert [t for t in opened.targets() if "all_reduce" in t] == ["_c10d_functional.all_reduce.default"] * 2


@pytest.mark.parametrize(
    ("ranks", "tier", "why"),
    [
        (3, "fused", "a width of 16 does not divide by 3 ranks"),
        (3, "column", "a width of 16 does not divide by 3 ranks"),
        (1, "overlap", "nothing is summed over ranks"),
        (2, "cpu", "summed over ranks, by tiers"),
    ],
)
def test_a_tier_that_is_named_and_cannot_be_raises(ranks, tier, why):
    with (
        pretended_group(ranks) as name,
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"cannot be obeyed.*{why}"),
    ):
        lowered(name, providers={"latent_tail": tier})


def test_one_graph_serves_every_tier():
    def forward(rows, w, idx, norm_w, up_w, shared):
        torch._check(w.shape[0] == idx.shape[0])
        torch._check(shared.shape[0] == idx.shape[0])
        return tail(where_after, group=name)(rows, w, idx, norm_w, up_w, shared)

    with pretended_group(4) as name:
        names = "L['rows']:0,L['w']:0,L['idx']:0,L['shared']:0"
        made = Compiled(forward, (CANONICALIZE, LATENT_TAIL, Lower()), unbacked=names)
        for tokens in (4, 1, 0, 129, 257):
            assert made(*make_args(tokens=tokens)).shape == (tokens, 16)
    assert len(made.graphs) == 1
    assert "k3.latent_tail.tiers" in made.targets()


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_shared_expert_that_every_rank_has_whole_is_not_summed(ranks):
    """It would count once a rank; the routed part may not take it into its own sum either."""

    def after(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(reduce(select(rows, w, idx), name), norm_w), up_w) + shared

    def before(rows, w, idx, norm_w, up_w, shared):
        return linear(built_in(reduce(select(rows, w, idx) + shared, name), norm_w), up_w)

    with pretended_group(ranks) as name:
        for forward, why in (
            (after, "is not summed over ranks and the latent is: the op would sum it"),
            (before, "added before the sum over ranks"),
        ):
            made = lowered(name, forward, make_args(latent=16, width=16))
            (remark,) = made.remarks(None, "latent_tail")
            assert remark.kind == "missed"
            assert why in remark.reason
            assert not any(t.startswith("k3.latent_tail") for t in made.targets())


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_shared_expert_that_every_rank_has_a_part_of_is_summed_once(ranks):
    with pretended_group(ranks) as name:
        made = lowered(name)
    (op,) = [n for n in made.graphs[-1].graph.nodes if str(n.target).startswith("k3.latent_tail")]
    assert op.args[5].op == "placeholder", "the part itself, not its sum"
    assert op.args[-1] == name

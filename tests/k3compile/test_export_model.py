"""Checkpoints of the model's own layers, whose graphs they share, against runs that were cut there."""

import dataclasses
import random
import re

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.cache.writes import clear
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model

from k3compile.forward import CompiledForward, compile_forward, null_step, slots_of
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")
WITH_CACHE = ("contiguous_views", "state_export", "prefix_cache")  # the exact ones
QUICK = CompileOptions(inner="aot_eager", features=WITH_CACHE)
SLOTS, PAGES, PAGE, ROWS = 13, 80, 16, 8
DEEP = dataclasses.replace(
    SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 3), attn_res_block_size=0
)  # three layers of one kind, one of another, and one with pages


def pools_of(model):
    return model.make_pools(SLOTS, PAGES, PAGE, 3)


def compiled_once(config, tmp_path_factory):
    """A float64 model, compiled for the tests of this file that may share it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("reports")
        patch.setattr("k3compile.torch_private.cache_folder", lambda: folder)
        model = small_model(config)
        return compile_forward(model, pools_of(model), QUICK, ROWS)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return compiled_once(DEEP, tmp_path_factory)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    return compiled_once(SMALL_LINEAR, tmp_path_factory)


def tokens_of(count, seed=0):
    return torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pages_of(slot):
    return range(1 + 10 * (slot - 1), 1 + 10 * slot)


def mix(exports=()):
    """Rows of every sort; ``exports`` holds (offset, slot) of decode and prefill rows in their order."""
    rows = [Row(tokens_of(3, 1), 1, 5, pages_of(1), verify=True)]
    rows += [Row(tokens_of(1, 2), 2, 4, pages_of(2)), Row(tokens_of(130, 3), 3, 0, pages_of(3))]
    rows += [Row(tokens_of(66, 4), 4, 7, pages_of(4)), Row(tokens_of(5, 5), 5, 0, pages_of(5))]
    return with_exports(rows, exports)


def with_exports(rows, exports=()):
    step = make_step(rows, max_requests=ROWS)
    for i, (offset, slot) in enumerate(exports):
        step.export_offset[i], step.export_slot[i] = offset, slot
    return step


def fill(pools, seed=9):
    """Something in every slot that lives, in the same way for every set of pools."""
    made = torch.Generator().manual_seed(seed)
    for pool in pools:
        for tensor in pool:
            noise = torch.randn(tensor.shape, generator=made, dtype=torch.float64)
            tensor.copy_(0.1 * noise)


def plain(model, step, pools):
    with torch.no_grad():
        return model(step, pools)[0]


def kda(pools):
    return [pool for pool in pools if isinstance(pool, KdaPools)]


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.abs().max()).item()


def test_every_layer_leaves_its_own_checkpoint_though_layers_share_a_graph(k3):
    assert k3.graphs() == 3, "four KDA layers, two graphs"
    check_every_layer(k3, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound", "inner"),
    [(torch.float32, 1e-5, "aot_eager"), (torch.float64, 1e-12, "eager")],
    ids=str,
)
def test_so_it_does_in_float32_and_run_node_by_node(dtype, bound, inner):
    model = small_model(DEEP, dtype)
    options = dataclasses.replace(QUICK, inner=inner)
    check_every_layer(compile_forward(model, pools_of(model), options, ROWS), bound)


def check_every_layer(forward, bound):
    model, pools, own, graphs = forward.model, forward.pools, pools_of(forward.model), forward.graphs()
    for offsets in ([1, 64, 64, 0], [0, 128, 2, 5], [0, 100, 66, 3]):
        fill(pools), fill(own)
        step = mix([(offset, 8 + i) for i, offset in enumerate(offsets)])
        want, without = forward(mix())[0].clone(), [[t.clone() for t in pool] for pool in pools]
        fill(pools)
        assert torch.equal(forward(step)[0], want), "the results do not know of checkpoints"
        assert error(want, plain(model, mix(), own)) < bound
        for mine, theirs, uncompiled in zip(pools, without, own):
            live = [i for i in range(1, len(mine[0])) if i not in range(8, 12)]
            assert all(torch.equal(a[live], b[live]) for a, b in zip(mine, theirs))
            assert all(error(a[live], b[live]) < bound for a, b in zip(mine, uncompiled))
        for i, offset in enumerate(offsets):
            if offset:
                assert_equals_a_cut_run(model, pools, i, offset, bound)
    assert forward.graphs() == graphs


def assert_equals_a_cut_run(model, pools, row, offset, bound):
    """Slot 8 + row of every layer against the mix with that row stopped at ``offset``.

    Fewer rows round differently in the projections, so no bits are compared; those of the op itself are in
    the tests of the op.
    """
    cut = pools_of(model)
    fill(cut)
    step = mix()
    begin, end = step.cu_other[row].item(), step.cu_other[row + 1].item()
    first = step.spans[0].item() + begin
    keep = torch.ones(len(step.tokens), dtype=torch.bool)
    keep[first + offset : first + end - begin] = False
    cu = torch.where(
        torch.arange(len(step.cu_other)) > row, step.cu_other - (end - begin - offset), step.cu_other
    )
    lengths = cu.diff().tolist()
    spans = torch.tensor([step.spans[0], lengths.count(1), sum(n for n in lengths if n > 1)])
    shorter = step._replace(tokens=step.tokens[keep], cu_other=cu, spans=spans)
    plain(model, shorter, cut)
    slot = step.slots[len(step.cu_verify) - 1 + row]
    for layer, (mine, theirs) in enumerate(zip(kda(pools), kda(cut))):
        for got, want in zip(mine[:2], theirs[:2]):
            assert error(got[8 + row], want[slot]) < bound, f"row {row}, layer {layer}, offset {offset}"


def greedy(model, forward, prompt, slot, seen, count):
    """The next ``count`` tokens after ``prompt``, of which ``seen`` have been run."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        row = Row(tokens[seen:], slot, seen, pages_of(3))
        hidden = forward(with_exports([row]))
        seen = len(tokens)
        tokens.append(model.logits(hidden[-1]).argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("offset", [64, 50, 129])
def test_a_run_resumed_from_the_checkpoint_says_the_same_tokens(k3, offset):
    model, own, prompt = k3.model, pools_of(k3.model), tokens_of(130, 7)
    fill(k3.pools)
    clear(k3.pools, [3])
    want = greedy(model, lambda step: plain(model, step, own), prompt, 3, 0, 12)
    assert len(set(want)) > 3, "a model that repeats itself would show nothing"
    step = with_exports([Row(prompt, 3, 0, pages_of(3))], [(offset, 9)])
    first = model.logits(k3(step)[0][-1]).argmax().item()
    assert first == want[0]
    assert greedy(model, lambda step: k3(step)[0], prompt, 9, offset, 12) == want


@pytest.mark.slow
def test_twenty_mixes_with_changing_offsets_make_one_graph_a_kind(linear):
    pools, own, rng = linear.pools, pools_of(linear.model), random.Random(2)
    fill(pools), fill(own)
    for _ in range(20):
        counts = [rng.choice([1, 2, 20, 70]) for _ in range(rng.randint(1, 4))]
        rows = [Row(tokens_of(n, n + i), i + 1, 3, pages_of(i + 1)) for i, n in enumerate(counts)]
        lengths = sorted(counts, key=lambda n: n > 1)
        exports = [(rng.randint(0, n), 8 + i) for i, n in enumerate(lengths)]
        assert torch.equal(
            linear(with_exports(rows, exports))[0], plain(linear.model, with_exports(rows), own)
        )
    assert linear.graphs() == 3
    for mine, theirs in zip(kda(pools), kda(own)):
        assert torch.equal(mine.state[1:8], theirs.state[1:8])
        assert all(not torch.equal(mine.state[8 + i], theirs.state[8 + i]) for i in range(4)), "none exported"


def test_every_prefill_exports_and_still_writes_its_rows_of_the_buffer_itself(k3):
    for report in k3.reports:
        is_kda = "k3.kda_decay" in report.choices
        assert report.applied("state_export") == (2 if is_kda else 0)
        assert report.missed("state_export") == []
        assert report.applied("contiguous_views") == (8 if is_kda else 0)
        views = [
            r.detail for r in report.remarks if r.pass_name == "contiguous_views" and r.kind == "applied"
        ]
        assert any("k3.kda_prefill_export_into" in detail for detail in views) == is_kda


def test_without_a_prefix_cache_the_engines_graphs_have_no_exports():
    model = small_model(dataclasses.replace(SMALL_LINEAR, num_hidden_layers=1, kda_layers=(0,)))
    forward = compile_forward(model, pools_of(model), CompileOptions(inner="aot_eager"), ROWS)
    assert {r.features["state_export"] for r in forward.reports} == {"inert"}
    assert sum(r.applied("state_export") for r in forward.reports) == 0


def test_a_step_of_an_engine_that_holds_more_requests_is_refused(k3):
    rows = [Row([1, 2], 1, 0, pages_of(1))]
    with pytest.raises(ValueError, match="9 offsets are given, and the graph was compiled for 8"):
        k3(make_step(rows, max_requests=ROWS + 1))


def test_a_wrong_offset_ends_the_step_with_row_and_value(k3):
    rows = [Row([1, 2], 1, 0, pages_of(1)), Row([3], 2, 0, pages_of(2))]
    with pytest.raises(ValueError, match=r"export_offset of row 0 is 2; the row has 1 tokens"):
        k3(with_exports(rows, [(2, 9)]))
    with pytest.raises(ValueError, match=r"export_slot of row 1 is 2, where row 0 of this call"):
        k3(with_exports(rows, [(0, 0), (2, 2)]))


def test_the_export_columns_are_as_long_as_the_engine_says_or_there_are_slots(k3):
    assert k3.layer.max_requests == len(null_step(torch.device("cpu"), ROWS).export_offset) == ROWS
    assert slots_of(k3.pools) == SLOTS - 1


@pytest.mark.parametrize("which", ["k3", pytest.param("linear", marks=pytest.mark.slow)])
def test_a_forward_says_that_it_exports_when_each_kind_with_a_state_does(which, request):
    forward = request.getfixturevalue(which)
    assert forward.exports
    for wrong in (forward.reports[:-1], [], [dataclasses.replace(r, records=()) for r in forward.reports]):
        other = CompiledForward(forward.model, forward.pools, QUICK, ROWS)
        other.layer.reports.extend(wrong)
        assert not other.exports
        assert not other._exports()


@pytest.mark.inductor
def test_inductors_wrapper_exports_without_allocating_or_copying_a_pool():
    from torch._inductor.utils import fresh_cache, run_and_get_code

    config = dataclasses.replace(SMALL, num_hidden_layers=2, kda_layers=(1,), attn_res_block_size=0)
    model = small_model(config, torch.float32)
    pools, own = pools_of(model), pools_of(model)
    forward = CompiledForward(model, pools, CompileOptions(features=WITH_CACHE), ROWS)
    with fresh_cache():
        _, codes = run_and_get_code(forward.warm_up)
    code = "\n".join(codes)
    for name in ("kda_prefill_export_into", "short_conv_export"):
        assert re.search(rf"torch\.ops\.k3\.{name}\.(default|native)\(", code)
    assert "copy_" not in code
    for pool in pools:
        for tensor in pool:
            shape = ", ".join(map(str, tensor.shape))
            assert f"empty_strided_cpu(({shape})" not in code
            assert f"({shape})" in code, "a pool looks different in the wrapper: this test sees nothing"
    step = mix([(1, 8), (128, 9), (66, 10)])
    torch.testing.assert_close(forward(step)[0], plain(model, mix(), own), atol=1e-3, rtol=1e-3)
    for row, offset in ((1, 128), (2, 66)):
        cut = pools_of(model)
        rows = [Row(tokens_of(130, 3)[:offset], 3, 0, pages_of(3)), Row(tokens_of(66, 4), 4, 7, pages_of(4))]
        plain(model, with_exports([rows[row - 1]]), cut)
        assert error(kda(pools)[0].state[8 + row], kda(cut)[0].state[2 + row]) < 1e-3
        torch.testing.assert_close(kda(pools)[0].window[8 + row], kda(cut)[0].window[2 + row])

"""Four graphs for Kimi K3's kinds of layer, none more for any batch, and the bits of the plain forward."""

import dataclasses
import random
import re
from typing import NamedTuple

import pytest
import torch
from k3compile.kernels.choice import by_meaning
from k3compile.runtime.model import Model
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model

from k3compile.forward import (
    CompiledForward,
    LayerCompiler,
    compile_forward,
    compile_in_background,
    null_step,
    unbacked_rows,
)
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")
QUICK = CompileOptions(inner="aot_eager")
SLOTS, PAGES, PAGE = 9, 40, 4
FIVE = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
ONE_KIND = dataclasses.replace(SMALL_LINEAR, num_hidden_layers=1, kda_layers=())


def pools_of(model):
    scratch = 0 if model.state_replay else 3 * (SLOTS - 1)
    return model.make_pools(SLOTS + scratch, PAGES, PAGE, 3)


def random_step(generator: random.Random):
    """A mix of verify, decode and prefill rows; each kind is absent in some of them."""
    slots, pages = list(range(1, SLOTS)), iter(range(1, PAGES))
    generator.shuffle(slots)
    some = generator.choice([(True, False), (False,), (True,)])
    rows = []
    for _ in range(generator.randint(1, 5)):
        count, seen = generator.choice([1, 1, 2, 3, 6]), generator.randint(0, 5)
        verify = generator.choice(some) and count <= 4
        tokens = [generator.randrange(90) for _ in range(count)]
        table = [next(pages) for _ in range(-(-(seen + count) // PAGE))]
        slot = slots.pop()
        own = [slot, *(SLOTS + 3 * (slot - 1) + i for i in range(3))]  # without state replay
        rows.append(Row(tokens, slot, seen, table, verify, own[:count] if verify else ()))
    return make_step(rows)


def plain(model, step, pools):
    with torch.no_grad():
        return model(step, pools)


def copy_pools(to, source):
    for one, two in zip(to, source):
        for x, y in zip(one, two):
            x.copy_(y)


def same_state(a, b) -> bool:
    """Whether two sets of pools agree outside the null slot and the null page."""
    return all(torch.equal(x[1:], y[1:]) for one, two in zip(a, b) for x, y in zip(one, two))


class Served(NamedTuple):
    """A model, its compiled forward, and pools for the plain forward that are in the same state."""

    model: Model
    forward: CompiledForward
    own: list

    def agrees(self, step) -> bool:
        """Whether compiled and plain give the same bits for one more step."""
        got, want = self.forward(step), plain(self.model, step, self.own)
        return all(torch.equal(a, b) for a, b in zip(got, want))


def serve(config, options=QUICK, **more):
    model = small_model(config, **more)
    return Served(model, compile_forward(model, pools_of(model), options), pools_of(model))


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """Kimi K3's four kinds in five layers, compiled once for this file."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("reports")
        patch.setattr("k3compile.torch_private.cache_folder", lambda: folder)
        served = serve(FIVE)
    for pool in served.forward.pools:
        for tensor in pool:
            assert not tensor[1:].any(), "the warm-up writes the null slot and page only"
    return served


def test_four_graphs_for_k3_and_none_for_any_mix_after_the_warm_up(k3):
    assert len({FIVE.kind(i) for i in range(FIVE.num_hidden_layers)}) == 4
    assert k3.forward.graphs() == 4
    generator = random.Random(0)
    assert all(k3.agrees(random_step(generator)) for _ in range(30))
    assert k3.forward.graphs() == 4
    assert same_state(k3.forward.pools, k3.own)


@pytest.mark.slow
def test_a_model_of_other_widths_before_it_in_the_process_changes_nothing(k3):
    """Left to itself Dynamo remembers the widths of the first model and makes those of the second dynamic."""
    wider = dataclasses.replace(SMALL, hidden_size=48, intermediate_size=64, moe_intermediate_size=64)
    served = serve(wider)
    generator = random.Random(6)
    assert all(served.agrees(random_step(generator)) for _ in range(10))
    assert served.forward.graphs() == 4


def test_every_index_operation_of_a_mixed_step_is_gone(k3):
    for report in k3.forward.reports:
        is_kda = "k3.kda_decay" in report.choices
        assert report.applied("contiguous_views") == (8 if is_kda else 0)


def test_without_the_prefix_cache_no_checkpoint_is_promised(k3):
    assert not k3.forward.exports


@pytest.mark.slow
def test_without_state_replay_a_kind_has_one_graph_too_and_its_ops_write_their_own_rows():
    served = serve(SMALL_LINEAR, state_replay=False)
    generator = random.Random(7)
    assert all(served.agrees(random_step(generator)) for _ in range(10))
    assert same_state(served.forward.pools, served.own)
    assert served.forward.graphs() == 3
    for report in served.forward.reports:
        assert report.applied("contiguous_views") == (8 if "k3.kda_decay" in report.choices else 0)


def test_the_mode_of_the_caller_makes_no_graph(k3):
    assert k3.agrees(make_step([Row([5], 1)]))
    with torch.inference_mode():
        step = make_step([Row([5, 6], 1, 1)])
        k3.forward(step)
    with torch.no_grad():
        hidden, _ = k3.forward(make_step([Row([5], 1, 3)]))
    assert not hidden.is_inference()
    assert k3.forward.graphs() == 4


def test_wrong_sizes_still_raise_after_compilation(k3):
    """The facts that proofs rest on are asserted at run time."""
    step = make_step([Row([1, 2, 3], 2)])
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        k3.forward(step._replace(spans=torch.tensor([0, 1, 1])))


@pytest.mark.slow
def test_a_compiled_forward_serves_while_another_one_is_compiled(k3):
    model, results = small_model(SMALL_LINEAR), []
    thread = compile_in_background(model, pools_of(model), QUICK, results.append, results.append)
    copy_pools(k3.own, k3.forward.pools)
    generator = random.Random(3)
    while thread.is_alive():
        assert k3.agrees(random_step(generator))
    assert isinstance(results[0], CompiledForward), results


@pytest.mark.slow
def test_kimi_linear_has_a_graph_a_kind_too_whatever_mode_its_pools_were_made_in():
    model = small_model(SMALL_LINEAR)
    with torch.inference_mode():
        pools = pools_of(model)
    served = Served(model, compile_forward(model, pools, QUICK), pools_of(model))
    assert served.forward.graphs() == 3
    generator = random.Random(5)
    assert all(served.agrees(random_step(generator)) for _ in range(10))
    assert served.forward.graphs() == 3


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_two_hundred_mixes_make_no_new_graph(inner):
    # bits are compared in float64: in float32 the latent tail has an implementation that rounds otherwise
    model = small_model(SMALL, torch.float64 if inner == "aot_eager" else torch.float32)
    pools, own = pools_of(model), pools_of(model)
    forward = compile_forward(model, pools, CompileOptions(inner=inner))
    generator = random.Random(1)
    for _ in range(200):
        step = random_step(generator)
        got, want = forward(step)[0], plain(model, step, own)[0]
        assert got.shape == want.shape
        if inner == "aot_eager":
            assert torch.equal(got, want)
    assert forward.graphs() == 4


def test_six_layers_of_a_kind_share_one_graph():
    config = dataclasses.replace(
        SMALL, num_hidden_layers=9, kda_layers=tuple(range(8)), attn_res_block_size=0
    )
    model = small_model(config)
    pools = pools_of(model)
    layer = LayerCompiler(QUICK)
    step, p = null_step(torch.device("cpu")), torch.zeros(1, config.hidden_size, dtype=torch.float64)
    with torch.no_grad(), unbacked_rows():
        for index in range(1, 7):
            assert config.kind(index) == ("kda", "moe", False)
            layer(model.layers[index], p, p.new_empty(0, 1, config.hidden_size), pools[index], step)
    assert len(layer.reports) == 1


def test_two_forwards_in_a_process_do_not_share_a_recompile_limit():
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            assert serve(ONE_KIND).forward.graphs() == 1


def test_any_number_of_engines_may_compile_one_after_the_other():
    model, step = small_model(ONE_KIND), random_step(random.Random(5))
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):  # one forward's graph fits
        for _ in range(3):
            forward = compile_forward(model, pools_of(model), CompileOptions(inner="eager"))
            with torch.no_grad():
                forward(step)
            assert forward.graphs() == 1


@pytest.mark.slow
def test_compiling_behind_a_forward_that_serves_disturbs_neither():
    """make_fx swaps nn.Module.__call__ process-wide while it traces; other threads run through it."""
    model = small_model(SMALL_LINEAR)
    pools, own = pools_of(model), pools_of(model)
    call, getattr_ = torch.nn.Module.__call__, torch.nn.Module.__getattr__
    results, generator = [], random.Random(2)
    thread = compile_in_background(model, pools, QUICK, ready=results.append, failed=results.append)
    while thread.is_alive():
        step = random_step(generator)
        assert torch.equal(plain(model, step, pools)[0], plain(model, step, own)[0])
    (forward,) = results
    assert isinstance(forward, CompiledForward), forward
    assert forward.graphs() == 3
    assert same_state(pools, own)
    assert torch.nn.Module.__call__ is call
    assert torch.nn.Module.__getattr__ is getattr_
    served = Served(model, forward, own)
    assert all(served.agrees(random_step(generator)) for _ in range(5))


def test_a_compile_that_fails_behind_is_reported_and_the_forward_serves_on():
    model = small_model(SMALL_LINEAR)
    pools = pools_of(model)
    errors = []
    options = CompileOptions(inner="aot_eager", require={"contiguous_views": 99})
    compile_in_background(model, pools, options, ready=errors.append, failed=errors.append).join()
    assert "of the required 99 sites" in str(errors[0])
    assert torch.isfinite(plain(model, make_step([Row([1, 2], 1)]), pools)[0]).all()


@pytest.mark.inductor
@pytest.mark.parametrize("verify", ["kda_verify", "kda_verify_states"])
def test_inductors_wrapper_allocates_and_copies_no_pool(verify):
    from torch._inductor.utils import fresh_cache, run_and_get_code

    config = dataclasses.replace(SMALL, num_hidden_layers=2, kda_layers=(1,), attn_res_block_size=0)
    model = small_model(config, torch.float32, state_replay=verify == "kda_verify")
    pools = pools_of(model)
    forward = CompiledForward(model, pools, CompileOptions())
    with fresh_cache():
        _, codes = run_and_get_code(forward.warm_up)
    code = "\n".join(codes)
    assert forward.graphs() == len(codes) == 2
    for name in ("kda_prefill_into", f"{verify}_into", "mla_write", "short_conv"):
        assert re.search(rf"torch\.ops\.k3\.{name}\.(default|native)\(", code), name
    assert "copy_" not in code
    for pool in pools:
        for tensor in pool:
            shape = ", ".join(map(str, tensor.shape))
            if not tensor.numel():
                continue  # records, where states are not replayed
            assert f"empty_strided_cpu(({shape})" not in code
            assert f"({shape})" in code, "a pool looks different in the wrapper: this test sees nothing"


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_agrees_with_eager_up_to_rounding():
    model = small_model(SMALL, torch.float32)
    pools, own = pools_of(model), pools_of(model)
    forward = compile_forward(model, pools, CompileOptions())
    generator = random.Random(4)
    for _ in range(10):
        step = random_step(generator)
        got, want = forward(step)[0], plain(model, step, own)[0]
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_what_runs_outside_the_layers_is_chosen_as_inside_them():
    model = small_model(SMALL, torch.float32)
    asked = {"kda_commit": "meaning"}
    for options, want in ((QUICK, {}), (dataclasses.replace(QUICK, lower=asked), asked)):
        assert CompiledForward(model, pools_of(model), options).compute.lower == want
    opened = dataclasses.replace(QUICK, features="plain")
    assert CompiledForward(model, pools_of(model), opened).compute is by_meaning

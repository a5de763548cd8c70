"""export_at asks, the compiled call exports, checkpoints reads: without slots, with slots, from threads."""

import threading

import k3compile.kernels
import pytest
import torch
from k3compile.passes.extra_inputs import ExtraInput
from torch import nn

import k3compile
from k3compile import export, report
from k3compile.extra_inputs import supplier_of

pytestmark = pytest.mark.usefixtures("own_reports")
ops = torch.ops.k3
H, K, V, C, LAYERS, BATCH = 2, 4, 4, 24, 3, 2


class Layer(nn.Module):
    """Conv, KDA and a residual, its states handed in and handed back."""

    def __init__(self, seed):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.mix = nn.Parameter(torch.randn(H * V, C, generator=made, dtype=torch.float64) / 3)
        self.conv = nn.Parameter(torch.randn(C, 4, generator=made, dtype=torch.float64))

    def forward(self, x, state, window):
        y, window = ops.conv_scan(x @ self.mix, self.conv, window)
        q, k, v = y.unflatten(-1, (3, H, K)).unbind(2)
        g, beta = -v.abs(), torch.sigmoid(q.sum(-1))
        o, state = ops.kda_scan(ops.l2_norm(q, 0.5), ops.l2_norm(k, 1.0), v, g, beta, state)
        return x + o.flatten(2), state, window


class Model(nn.Module):
    """Layers one after the other; ``run`` is what runs a layer."""

    def __init__(self, seed=0, run=Layer.forward):
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed + i) for i in range(LAYERS))
        self.run = run

    def forward(self, x, states, windows):
        left = []
        for layer, state, window in zip(self.layers, states, windows):
            x, state, window = self.run(layer, x, state, window)
            left.append((state, window))
        return x, left


def inputs(tokens=100, seed=0):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=made, dtype=torch.float64)

    states, windows = normal(LAYERS, BATCH, H, V, K).unbind(0), normal(LAYERS, BATCH, 3, C).unbind(0)
    return normal(BATCH, tokens, H * V), states, windows


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="k3", fullgraph=True, options={"inner": "aot_eager"} | options)


def assert_cut_at(model, found, offsets, seed=0):
    """Rows of every layer's checkpoint against a run over the first tokens alone."""
    x, states, windows = inputs(seed=seed)
    assert len(found.states) == len(found.windows) == LAYERS
    for row, offset in enumerate(offsets):
        _, left = model(x[:, :offset], states, windows)
        for layer, (state, window) in enumerate(left):
            for got, want in ((found.states[layer], state), (found.windows[layer], window)):
                want = want[row] if offset else torch.zeros_like(want[row])
                torch.testing.assert_close(got[row], want, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_a_model_without_slots_is_exported_by_default_and_layers_keep_their_own_checkpoint():
    model = Model()
    fast = compiled(model)
    want = model(*inputs())
    for offsets in ([64, 0], [1, 2], [50, 100], [99, 3]):
        with k3compile.export_at(offsets):
            got = fast(*inputs())
        assert torch.equal(got[0], want[0])
        found = k3compile.checkpoints(fast)
        assert found.offsets == tuple(offsets)
        assert_cut_at(model, found, offsets)
    assert torch.equal(fast(*inputs())[0], want[0])
    assert k3compile.checkpoints(fast).offsets == (99, 3), "a call that was asked for nothing exports nothing"
    made = report.latest()
    assert made.features["state_export"] == "on"
    assert (made.applied("state_export"), made.missed("state_export")) == (2 * LAYERS, [])


@torch.no_grad()
def test_a_resumed_run_ends_where_the_uncut_one_does():
    model = Model()
    fast = compiled(model)
    x, states, windows = inputs()
    with k3compile.export_at([70, 70]):
        whole, left = fast(x, states, windows)
    found = k3compile.checkpoints(fast)
    rest, again = model(x[:, 70:], found.states, found.windows)
    torch.testing.assert_close(rest, whole[:, 70:], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(again, left, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_layers_compiled_one_by_one_share_a_graph_and_not_a_checkpoint():
    torch._dynamo.reset()
    graphs = []

    def counted(gm, given):
        from k3compile.backend import CompileOptions, compile_graph

        graphs.append(gm)
        return compile_graph(gm, given, CompileOptions(inner="aot_eager"))

    model = Model(run=torch.compile(Layer.forward, backend=counted, fullgraph=True, dynamic=False))
    for offsets in ([64, 0], [5, 100]):
        with k3compile.export_at(offsets):
            model(*inputs())
        assert_cut_at(Model(), k3compile.checkpoints(model), offsets)
    assert len(graphs) == 1
    alone = k3compile.checkpoints(model.layers[1])
    assert len(alone.states) == 1
    assert torch.equal(alone.states[0], k3compile.checkpoints(model).states[1])


@torch.no_grad()
def test_two_models_and_two_threads_do_not_see_each_others_requests():
    models = [Model(0), Model(50)]
    torch._dynamo.reset()
    fast = [torch.compile(m, backend="k3", options={"inner": "aot_eager"}) for m in models]
    for f in fast:
        f(*inputs())
    gate, failed = threading.Barrier(2), []

    def work(which, offsets):
        try:
            with torch.no_grad():
                for _ in range(5):
                    with k3compile.export_at(offsets):
                        gate.wait()
                        fast[which](*inputs())
                        gate.wait()
                    assert_cut_at(models[which], k3compile.checkpoints(fast[which]), offsets)
        except Exception as error:  # a thread's failure has to reach the test
            failed.append(error)
            gate.abort()

    threads = [threading.Thread(target=work, args=(i, [30 + i, 64 * i])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def with_slots(x, weight, g, beta, state, window, slots, cu):
    y = ops.short_conv(x, weight, window, slots, cu)
    q, k, v = y.unflatten(-1, (3, H, K)).unbind(1)
    return ops.kda_prefill(ops.l2_norm(q, 0.5), ops.l2_norm(k, 1.0), v, g, beta, state, slots, cu)


def slot_inputs():
    made = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=made, dtype=torch.float64)

    parts = normal(80, C), normal(C, 4), -normal(80, H, K).abs(), normal(80, H).sigmoid()
    return [*parts, normal(6, H, V, K), normal(6, 3, C), torch.tensor([1, 2]), torch.tensor([0, 70, 80])]


@torch.no_grad()
def test_a_function_with_slots_exports_to_its_own_pools():
    fast = compiled(with_slots)
    args, cut = slot_inputs(), slot_inputs()
    with k3compile.export_at(torch.tensor([64, 0]), slots=[5, 0]):
        got = fast(*args)
    assert torch.equal(got, with_slots(*slot_inputs()))
    with_slots(
        *(t[:64] for t in cut[:1]),
        cut[1],
        *(t[:64] for t in cut[2:4]),
        *cut[4:6],
        torch.tensor([1]),
        torch.tensor([0, 64]),
    )
    assert torch.equal(args[4][5], cut[4][1])
    assert torch.equal(args[5][5], cut[5][1])


@torch.no_grad()
def test_what_cannot_be_exported_is_refused_in_the_users_words():
    fast = compiled(with_slots)
    fast(*slot_inputs())
    with (
        k3compile.export_at([1] * 257, [0] * 257),
        pytest.raises(ValueError, match=r"257 offsets .* for 256"),
    ):
        fast(*slot_inputs())
    with k3compile.export_at([64]), pytest.raises(ValueError, match=r"no slots.*export_at\(offsets, slots\)"):
        fast(*slot_inputs())
    with k3compile.export_at([71], [5]), pytest.raises(ValueError, match="export_offset of row 0 is 71"):
        fast(*slot_inputs())
    with k3compile.export_at([0]):
        fast(*slot_inputs())
    slow = compiled(Model())
    slow(*inputs())
    with k3compile.export_at([64], [5]), pytest.raises(ValueError, match="keeps its states outside of slots"):
        slow(*inputs())
    with k3compile.export_at([101, 0]), pytest.raises(ValueError, match="of row 0 is 101"):
        slow(*inputs())
    with k3compile.export_at([1, 1, 1]), pytest.raises(ValueError, match=r"3 offsets .* for 2"):
        slow(*inputs())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (([-1],), "from 0 to 2147483647 as offsets, got -1"),
        (([2**31],), "got 2147483648"),
        (([1.5],), "got 1.5"),
        ((["64"],), "got '64'"),
        (([True],), "got True"),
        (([64], [2, 3]), "got 1 offsets and 2 slots"),
        (([64], [-2]), "as slots, got -2"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_call(args, words):
    with pytest.raises(ValueError, match=words), k3compile.export_at(*args):
        pass


@torch.no_grad()
def test_reading_what_was_never_exported_says_what_to_do():
    model = Model()
    fast = compiled(model)
    fast(*inputs())
    with pytest.raises(ValueError, match=r"inside `with k3compile.export_at\(offsets\):`"):
        k3compile.checkpoints(fast)
    with pytest.raises(ValueError, match=r"wants what torch\.compile returned, got int"):
        k3compile.checkpoints(3)


@torch.no_grad()
def test_a_function_without_parameters_gives_what_its_thread_exported_last():
    model = Model().requires_grad_(False)
    plain = {name: p.detach().clone() for name, p in model.layers[0].named_parameters()}

    def function(x, state, window):
        return torch.func.functional_call(model.layers[0], plain, (x, state, window))

    x, states, windows = inputs()
    fast = compiled(function)
    with k3compile.export_at([7, 8]):
        fast(x, states[0], windows[0])
    found = k3compile.checkpoints(fast)
    want = model.layers[0](x[:, :7], states[0], windows[0])
    torch.testing.assert_close(found.states[0][0], want[1][0], atol=1e-12, rtol=1e-12)


def test_inference_mode_reads_and_writes_the_same_pools():
    model = Model().requires_grad_(False)
    fast = compiled(model)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode(), k3compile.export_at([64, 10]):
            fast(*inputs())
        with torch.no_grad():
            assert_cut_at(model, k3compile.checkpoints(fast), [64, 10])


def test_a_call_that_is_asked_for_nothing_allocates_nothing():
    zeros = torch.zeros(4, dtype=torch.int32)
    for key in ("export_offset", "export_slot", "export_sequence_offset", "export_pool:kda_scan"):
        supply = supplier_of(ExtraInput("x", key, zeros))
        assert supply(()) is zeros
        assert supply(()) is zeros
    with k3compile.export_at([5], [3]):
        supply = supplier_of(ExtraInput("x", "export_slot", zeros))
        assert supply(()).tolist() == [3, 0, 0, 0]
        assert supply(()) is supply(()), "layers share one tensor"
    assert export._asked.get() is None


def test_the_innermost_request_counts_and_ends_with_its_context():
    supply = supplier_of(ExtraInput("x", "export_sequence_offset", torch.zeros(2, dtype=torch.int32)))
    with k3compile.export_at([5]):
        with pytest.raises(ZeroDivisionError), k3compile.export_at([6, 7]):
            assert 1 / (supply(()).tolist() != [6, 7])
        assert supply(()).tolist() == [5, 0]
    assert supply(()).tolist() == [0, 0]


@torch.no_grad()
def test_what_could_not_export_does_not_end_quietly():
    with k3compile.open_ops():
        fast = compiled(with_slots)
        fast(*slot_inputs())
    assert report.latest().applied("state_export") == 0
    for call in (fast, with_slots):
        said = pytest.raises(ValueError, match="nothing inside export_at exported")
        with said, k3compile.export_at([64], [5]):
            call(*slot_inputs())
        with k3compile.export_at([0], [0]):
            call(*slot_inputs())


@pytest.mark.inductor
@torch.no_grad()
def test_inductor_exports_from_a_model_without_slots_and_copies_no_pool():
    from torch._inductor.utils import fresh_cache, run_and_get_code

    model = Model()
    torch._dynamo.reset()
    fast = torch.compile(model, backend="k3")
    with fresh_cache(), k3compile.export_at([64, 33]):
        got, codes = run_and_get_code(fast, *inputs())
    torch.testing.assert_close(got[0], model(*inputs())[0])
    assert_cut_at(model, k3compile.checkpoints(fast), [64, 33])
    code = "\n".join(codes)
    assert "torch.ops.k3.kda_scan_export.default(" in code
    for pool in ((LAYERS, BATCH, H, V, K), (LAYERS, BATCH, 3, C)):
        shape = ", ".join(map(str, pool))
        assert f"empty_strided_cpu(({shape})" not in code
        assert f"({shape})" in code, "a pool looks different in the wrapper: this test sees nothing"
    assert "copy_" not in code


@torch.no_grad()
@pytest.mark.slow
def test_a_second_call_replaces_the_first_ones_checkpoints_whichever_graph_serves_it():
    model = Model()
    fast = compiled(model)
    with k3compile.export_at([7, 20]):
        fast(*inputs(tokens=100))
        fast(*inputs(tokens=60, seed=1))  # another length: Dynamo makes a second graph of the function
    found = k3compile.checkpoints(fast)
    assert len(found.states) == len(found.windows) == LAYERS
    x, states, windows = inputs(tokens=60, seed=1)
    _, left = model(x[:, :7], states, windows)
    for layer, (state, window) in enumerate(left):
        torch.testing.assert_close(found.states[layer][0], state[0], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found.windows[layer][0], window[0], atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_what_a_failed_call_left_is_not_read_as_a_checkpoint():
    model = Model()
    fast = compiled(model)
    with pytest.raises(ValueError, match="export_offset of row 0 is 101"), k3compile.export_at([101, 0]):
        fast(*inputs())
    with pytest.raises(ValueError, match="the last export_at ended with an error"):
        k3compile.checkpoints(fast)
    with k3compile.export_at([64, 10]):
        fast(*inputs())
    assert_cut_at(model, k3compile.checkpoints(fast), [64, 10])

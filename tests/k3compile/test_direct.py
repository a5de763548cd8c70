"""Layers and the head call graphs without Dynamo's frame, as long as nothing that it guards has changed."""

import pytest
import torch
from k3compile.kernels.native import threads
from k3compile.runtime.cache.writes import clear
from k3compile.runtime.model import DecoderLayer, scores
from small_models import SMALL, small_model

from k3compile.direct import Direct, DirectHead
from k3compile.forward import LayerCompiler, null_step, unbacked_rows
from k3compile.options import CompileOptions

QUICK = CompileOptions(inner="eager")
WIDTH = SMALL.hidden_size


class Layers:
    """The first layers of a small model, compiled; ``dynamo`` counts calls that went through it."""

    def __init__(self):
        self.model, self.step, self.dynamo = small_model(SMALL), null_step(torch.device("cpu")), 0
        self.pools = self.model.make_pools(3, 3, 4)
        self.compiler = LayerCompiler(QUICK)
        compiled = self.compiler._forward

        def counted(*args):
            self.dynamo += 1
            return compiled(*args)

        self.compiler._forward = counted

    def arguments(self, index=0, rows=1, dtype=torch.float64):
        p = torch.randn(rows, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(index))
        return self.model.layers[index], p, p.new_zeros(1, rows, WIDTH), self.pools[index], self.step

    def run(self, *args, layer=None):
        clear([args[3]], [0, 1])
        with torch.no_grad(), unbacked_rows():
            return (layer or self.compiler)(*args)


@pytest.fixture
def layers():
    return Layers()


def test_only_the_first_call_of_a_layer_goes_through_dynamo(layers):
    for index in (0, 1, 2):
        args = layers.arguments(index)
        want = layers.run(*args, layer=DecoderLayer.forward)
        for _ in range(3):
            assert torch.equal(layers.run(*args), want)
        assert layers.dynamo == index + 1
    graphs = len(layers.compiler.reports)
    layers.step = layers.step._replace(tokens=layers.step.tokens + 1)
    layers.run(*layers.arguments(0))
    assert (layers.dynamo, len(layers.compiler.reports)) == (3, graphs)


def test_any_number_of_rows_runs_the_same_graph(layers):
    layers.run(*layers.arguments())
    three = torch.arange(3)
    layers.step = layers.step._replace(
        tokens=three, spans=torch.tensor([0, 0, 3]), cu_other=torch.tensor([0, 3])
    )
    args = layers.arguments(rows=3)
    assert torch.equal(layers.run(*args), layers.run(*args, layer=DecoderLayer.forward))
    assert layers.dynamo == 1


@pytest.mark.slow
def test_what_dynamo_would_compile_anew_goes_through_it(layers):
    layer, p, blocks, pools, step = layers.arguments()
    layers.run(layer, p, blocks, pools, step)
    wide = torch.randn(1, 2 * WIDTH, dtype=torch.float64)[:, ::2]
    changed = [
        (layer, wide, blocks, pools, step),
        (layer, p, blocks, layers.model.make_pools(5, 3, 4)[0], step),
        (layer, p, blocks, pools, step._replace(slots=step.slots.to(torch.int32))),
    ]
    for count, args in enumerate(changed, 2):
        want = layers.run(*args, layer=DecoderLayer.forward)
        assert torch.equal(layers.run(*args), want)
        assert layers.dynamo == count
    with torch.enable_grad(), unbacked_rows():
        layers.compiler(layer, p, blocks, pools, step)
    assert layers.dynamo == 5


def test_a_weight_that_was_replaced_is_the_one_that_is_read(layers):
    args = layers.arguments()
    before = layers.run(*args)
    norm = args[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2.0, requires_grad=False)
    want = layers.run(*args, layer=DecoderLayer.forward)
    assert not torch.equal(before, want)
    assert torch.equal(layers.run(*args), want)
    assert layers.dynamo == 1


def test_graphs_that_name_something_else_stay_with_dynamo(layers):
    beside = torch.ones(WIDTH, dtype=torch.float64)

    def forward(self, p, blocks, pools, step):
        return p + beside

    def two(self, p, blocks, pools, step):
        return p + 1.0, p + 2.0

    args, direct = layers.arguments(), layers.compiler._direct
    for function, want in ((forward, [args[1] + 1.0]), (two, [args[1] + 1.0, args[1] + 2.0])):
        compiled = torch.compile(
            function, backend=lambda gm, _: direct.watched(gm, lambda: gm.forward), fullgraph=True
        )
        for _ in range(2):
            got = direct.call(compiled, *args)
            assert torch.equal(torch.stack(want), torch.stack(got) if function is two else got[None])
        assert args[0] not in direct._bound


@pytest.mark.parametrize(("rows", "inside"), [(1, 1), (8, 1), (9, 3)])
def test_few_rows_run_on_the_calling_thread(rows, inside):
    before, seen = torch.get_num_threads(), []

    def graph(*args):
        seen.append((torch.get_num_threads(), threads()))
        return args

    layer, direct, step = torch.nn.Linear(1, 1), Direct(), null_step(torch.device("cpu"))
    p, blocks, pools = torch.zeros(rows, 4), torch.zeros(0, rows, 4), object()
    direct._bound[layer] = pools, direct._look(p, blocks, step), graph, lambda *args: args
    torch.set_num_threads(3)
    try:
        assert direct.call(None, layer, p, blocks, pools, step) is layer
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [(inside, 3)]


class Head:
    """The product that gives scores, compiled; ``dynamo`` counts calls that went through it."""

    def __init__(self):
        self.compiler, self.dynamo = LayerCompiler(QUICK, function=scores), 0
        compiled = self.compiler._forward

        def counted(*args):
            self.dynamo += 1
            return compiled(*args)

        self.compiler._forward = counted

    def same(self, hidden, head):
        with torch.no_grad(), unbacked_rows():
            assert torch.equal(self.compiler(hidden, head), scores(hidden, head))


def numbers(*shape, dtype=torch.float32):
    """Small whole ones, whose products are exact however they are summed."""
    return torch.randint(-4, 5, shape).to(dtype)


def test_scores_are_asked_of_dynamo_once_for_any_rows_and_any_weights_of_the_shape():
    head, weights = Head(), numbers(7, 4, dtype=torch.bfloat16)
    for rows in (1, 3, 20, 1):
        head.same(numbers(rows, 4), weights)
    head.same(numbers(2, 4), weights.clone())
    assert (head.dynamo, len(head.compiler.reports)) == (1, 1)


def test_scores_of_other_arguments_go_through_dynamo():
    head, hidden, weights = Head(), numbers(2, 4), numbers(7, 4, dtype=torch.bfloat16)
    changed = [
        (hidden, weights.float()),
        (hidden.double(), weights),
        (numbers(2, 8)[:, ::2], weights),
        (hidden, numbers(6, 4, dtype=torch.bfloat16)),
        (hidden, numbers(4, 7, dtype=torch.bfloat16).t()),
    ]
    for args in changed:
        head.same(hidden, weights)
        asked = head.dynamo
        for _ in range(2):
            head.same(*args)
            assert head.dynamo == asked + 1
    head.same(hidden, weights)
    asked = head.dynamo
    with unbacked_rows():
        head.compiler(hidden, weights)  # where gradients are on
    assert head.dynamo == asked + 1


@pytest.mark.parametrize(("rows", "inside"), [(1, 1), (8, 1), (9, 3)])
def test_scores_of_few_rows_run_on_the_calling_thread(rows, inside):
    before, seen = torch.get_num_threads(), []
    direct, hidden, weights = DirectHead(), torch.zeros(rows, 4), torch.zeros(3, 4)

    def graph(*args):
        seen.append((torch.get_num_threads(), threads()))
        return args

    direct.ask = lambda forward, *args: (None, (graph, lambda *args: args))
    direct.call(None, hidden, weights)
    torch.set_num_threads(3)
    try:
        assert direct.call(None, hidden, weights) is hidden
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [(inside, 3)]

"""Every op keeps what its declaration promises, over its own samples."""

import inspect

import pytest
import torch
from k3compile.kernels import OPS, Tolerance
from k3compile.kernels.op import check_signature, op
from k3compile.kernels.samples import Draw, row_bounds
from lanes import slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

NAMES = sorted(OPS)
# dimensions of each argument whose length only the data knows, as (argument, dimension)
RAGGED = {
    "add_rms_norm": [(0, 0, "T"), (1, 0, "T")],
    "mix_rms_norm": [(0, 0, "T"), (1, 0, "n"), (1, 1, "T")],
    "add_mix_rms_norm": [(0, 0, "T"), (1, 0, "T"), (2, 0, "n"), (2, 1, "T")],
    "attn_res_mix": [(0, 0, "T"), (1, 0, "n"), (1, 1, "T")],
    "finalize": [(0, 0, "N"), (1, 0, "T"), (2, 0, "T")],
    "gated_rms_norm": [(0, 0, "T"), (1, 0, "T")],
    "kda_decay": [(0, 0, "T")],
    "kda_decode": [(0, 0, "T"), (2, 0, "T"), (3, 0, "T"), (4, 0, "T"), (10, 0, "T")],
    "l2_norm": [(0, 0, "T")],
    "rms_norm": [(0, 0, "T")],
    "route": [(0, 0, "T")],
    "situ": [(0, 0, "T"), (1, 0, "T")],
    "short_conv": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R1")],
    "short_conv_verify": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R1")],
    "short_conv_verify_states": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R1"), (5, 0, "R")],
    "kda_prefill": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1")],
    "kda_prefill_into": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1"), (8, 0, "T2")],
    "short_conv_export": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R1")],
    "kda_prefill_export": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1")],
    "kda_prefill_export_into": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1"), (10, 0, "T2")],
    "kda_scan": [(i, d, "BT"[d]) for i in range(5) for d in range(2)] + [(5, 0, "B")],
    "kda_scan_export": [(i, d, "BT"[d]) for i in range(5) for d in range(2)] + [(5, 0, "B")],
    "conv_scan": [(0, 0, "B"), (0, 1, "T"), (2, 0, "B")],
    "conv_scan_export": [(0, 0, "B"), (0, 1, "T"), (2, 0, "B")],
    "kda_verify": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1")],
    "kda_verify_into": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1"), (11, 0, "T2")],
    "kda_verify_states": [*((i, 0, "T") for i in range(5)), (6, 0, "R"), (7, 0, "R1"), (8, 0, "R")],
    "kda_verify_states_into": [
        *((i, 0, "T") for i in range(5)),
        (6, 0, "R"),
        (7, 0, "R1"),
        (8, 0, "R"),
        (9, 0, "T2"),
    ],
    "linear_bf16": [(0, 0, "T")],
    "latent_tail": [(0, 0, "N"), (1, 0, "T"), (2, 0, "T"), (5, 0, "T")],
    "kda_commit": [(6, 0, "R"), (7, 0, "R"), (8, 0, "R")],
    "mla_write": [(0, 0, "T"), (2, 0, "R"), (3, 0, "R"), (4, 0, "R1")],
    "mla_attend": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R"), (5, 0, "R1")],
    "mla_attend_block": [(0, 0, "T"), (3, 0, "R"), (4, 0, "R"), (5, 0, "R1"), (6, 0, "T")],
    "mla_write_shard": [(0, 0, "T"), (2, 0, "R"), (3, 0, "R"), (4, 0, "R1")],
    "mla_attend_shard": [(0, 1, "T"), (2, 0, "R"), (3, 0, "R"), (4, 0, "R1")],
    "mla_attend_gathered": [(0, 0, "T"), (4, 0, "R"), (5, 0, "R"), (6, 0, "R1"), (7, 0, "T")],
    "mla_absorb": [(0, 0, "T")],
    "mla_expand": [(0, 1, "T")],
    "lse_merge": [(0, 1, "T"), (1, 1, "T")],
    "experts_unfinalized": [(0, 0, "T"), (1, 0, "T")],
    "experts_unfinalized_dense": [(0, 0, "T"), (1, 0, "T")],
}


def float64(args):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def outcome(fn, name, args):
    """What a call returns and what it leaves in the arguments it writes."""
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    returned = fn(*args)
    returned = [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]
    names = list(inspect.signature(OPS[name].meaning).parameters)
    return returned + [args[names.index(w)] for w in OPS[name].writes]


def assert_within(got, want, bound):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        if not g.is_floating_point():
            assert torch.equal(g, w)
        elif g.numel():
            assert torch.isfinite(g).all()
            assert (g.double() - w).abs().max() <= bound * w.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_the_declaration_at_the_first_sample(name):
    torch.library.opcheck(OPS[name].overload, next(iter(OPS[name].each_sample())))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_the_declaration_at_every_sample(name):
    for args in OPS[name].each_sample():
        torch.library.opcheck(OPS[name].overload, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_meaning_is_close_to_itself_in_float64(name, dtype):
    declared = OPS[name]
    for args in declared.each_sample(dtype):
        want = outcome(declared.meaning, name, float64(args))
        assert all(w.dtype != torch.float32 for w in want), "a float64 model runs in float64 throughout"
        assert_within(outcome(declared, name, args), want, declared.tolerance.of(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_is_close_to_the_meaning_in_float64(name):
    declared = OPS[name]
    for provided in declared.implementations.values():
        for args in declared.each_sample():
            if provided.objection(*args) is None:
                want = outcome(declared.meaning, name, float64(args))
                assert_within(outcome(provided.fn, name, args), want, declared.tolerance.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].opaque and OPS[n].open_form])
def test_an_opened_form_equals_the_meaning(name, dtype):
    declared = OPS[name]
    for args in declared.each_sample(dtype):
        want = outcome(declared.meaning, name, float64(args))
        assert_within(outcome(declared.open_form, name, args), want, declared.tolerance.of(dtype))


PADDED = ["short_conv", "short_conv_verify", "short_conv_verify_states"]  # take token rows past cu[-1]
PADDED += ["mla_write", "mla_attend", "mla_attend_block", "mla_write_shard", "mla_attend_shard"]


@pytest.mark.parametrize("rows", [[], [0], [3, 0, 2]], ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_opened_forms_do_not_read_token_rows_that_belong_to_nobody(name, rows):
    draw, cu, count = Draw(torch.float64), row_bounds(rows), len(rows)
    x = torch.cat([draw.normal(sum(rows), 12), torch.full((4, 12), torch.nan, dtype=torch.float64)])
    slots, seen = torch.arange(1, count + 1), torch.full((count,), 4)
    columns = 2 if sum(rows) else 1  # a row without tokens has no cell left after those it has seen
    table = torch.arange(1, columns * count + 1).view(count, columns)
    pages, window = draw.normal(8, 4, 12), draw.normal(10, 3, 12)
    weight, kv_b, records = draw.normal(12, 4), draw.normal(10, 10), draw.normal(10, 9, 12)
    scratch = torch.stack([slots, slots + 3, slots + 6], 1)
    place = torch.tensor([1, 2, 1])
    args = {
        "short_conv": (x, weight, window, slots, cu),
        "short_conv_verify": (x, weight, window, slots, cu, records),
        "short_conv_verify_states": (x, weight, window, slots, cu, scratch),
        "mla_write": (x, pages, table, seen, cu),
        "mla_attend": (x.view(-1, 2, 6), kv_b, pages, table, seen, cu, 0.5),
        "mla_attend_block": (x.view(-1, 2, 6), kv_b, pages, table, seen, cu, x, 0.5),
        "mla_write_shard": (x, pages, table, seen, cu, place),
        "mla_attend_shard": (x.expand(3, -1, -1), pages, table, seen, cu, place, 10, 0.5),
    }[name]
    got, want = outcome(OPS[name].open_form, name, args), outcome(OPS[name].meaning, name, args)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        written = i >= len(got) - len(OPS[name].writes)  # slot and page 0 take what belongs to nobody
        torch.testing.assert_close(a[written:], b[written:], rtol=1e-12, atol=1e-12)


def without_data(fn, name):
    """Run ``fn`` on a sample whose ragged dimensions are symbols that no one may look at."""
    args, sizes = max(map(list, OPS[name].each_sample()), key=lambda args: args[0].numel()), {}
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for at, dim, letter in RAGGED[name]:
            if letter not in sizes:
                sizes[letter] = mode.shape_env.create_unbacked_symint()
                torch._check(sizes[letter] >= 0)
            shape = list(args[at].shape)
            shape[dim] = sizes[letter]
            args[at] = torch.empty(shape, dtype=args[at].dtype)
        fn(*(mode.from_tensor(a) if type(a) is torch.Tensor else a for a in args))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_need_no_data(name):
    without_data(OPS[name], name)


LARGE = {"mla_attend", "mla_attend_block", "mla_attend_shard", "experts_unfinalized"}


@pytest.mark.parametrize("name", [slow(n) if n in LARGE else n for n in NAMES if OPS[n].open_form])
def test_an_open_form_guards_on_no_token_count(name):
    without_data(OPS[name].open_form, name)


@pytest.mark.parametrize("name", NAMES)
def test_samples_reach_the_empty_step(name):
    assert any(
        a.numel() == 0 for args in OPS[name].each_sample() for a in args if isinstance(a, torch.Tensor)
    )


def test_an_op_is_declared_once_and_names_what_it_writes():
    with pytest.raises(ValueError, match="declared twice"):
        check_signature("rms_norm", ["x"], ())
    with pytest.raises(ValueError, match="not among its arguments"):
        check_signature("fresh", ["x"], ("y",))
    with pytest.raises(ValueError, match="at most 10"):
        check_signature("fresh", [f"a{i}" for i in range(11)], ())


def test_dynamo_looks_into_no_body_of_an_op_that_python_calls():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    def left_to_python(*args):
        for _ in range(2):  # a break in a loop: Dynamo leaves the whole function to Python
            result = OPS["rms_norm"].overload(*args)
            torch._dynamo.graph_break()
        return result

    torch._dynamo.reset()
    args = next(OPS["rms_norm"].each_sample())
    got = torch.compile(left_to_python, backend=backend)(*args)
    assert torch.equal(got, OPS["rms_norm"](*args))
    assert graphs == []
    torch.compile(OPS["rms_norm"].meaning, backend=backend, fullgraph=True)(*args)
    assert len(graphs) == 1, "a meaning that is called by itself is Python like any other"


def test_an_op_without_samples_says_so():
    @op()
    def only_declared_here(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    try:
        with pytest.raises(LookupError, match="declares no samples"):
            next(only_declared_here.each_sample())
        assert torch.ops.k3.only_declared_here(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        del OPS["only_declared_here"]


def test_a_tolerance_is_looked_up_by_dtype():
    assert Tolerance().of(torch.float64) < Tolerance().of(torch.float32) < Tolerance().of(torch.bfloat16)

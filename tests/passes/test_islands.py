"""Islands are pure, of known sizes, convex and between barriers; cutting them out changes no bit."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from compiled import Compiled, check
from k3compile.passes.islands import IslandRefused, Islands
from k3compile.passes.runner import Fuel
from lanes import thinned

ops = torch.ops.k3


class Own(torch.nn.Module):
    """An island that its own graph computes."""

    def __init__(self, graph):
        super().__init__()
        self.graph = [graph]

    def forward(self, *args):
        return self.graph[0](*args)


def own(name, graph, inputs):
    assert len(inputs) == len(graph.graph.find_nodes(op="placeholder"))
    return Own(graph)


def cut(fn, *calls, **options):
    """Check ``fn`` against eager with its islands cut out."""
    return check(fn, *calls, passes=(Islands("own", own),), **options)


def said(compiled, kind):
    return [r.reason for r in compiled.remarks(kind, "islands")]


def calls(compiled):
    return compiled.graphs[0].graph.find_nodes(op="call_module", target="island_0")


def rows(n=4, seed=0):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


W = rows(8, seed=9)


def mlp(x, w):
    return torch.nn.functional.silu(x @ w) @ w.t()


def test_an_mlp_is_one_island():
    compiled = cut(mlp, [rows(), W])
    (remark,) = compiled.remarks("applied", "islands")
    assert remark.reason == "compiled by own"
    assert remark.detail == (
        "4 ops (mm x2, silu, t); inputs float32[4, 8], float32[8, 8]; outputs float32[4, 8]"
    )
    assert compiled.targets() == ["<built-in function getitem>"]
    assert said(compiled, "missed") == []


def test_one_graph_serves_all_sizes():
    compiled = cut(mlp, [rows(4), W], [rows(7), W], dynamic=True)
    assert len(compiled.graphs) == 1
    assert said(compiled, "applied") == ["compiled by own"]


def test_one_op_alone_is_not_taken():
    compiled = cut(lambda x, w: (x @ w).view(2, 2, 8), [rows(), W])
    assert said(compiled, "missed") == ["fewer than 2 ops that compute"]
    assert not calls(compiled)


def state(x, pool):
    y = (x * 2).sin()
    pool.add_(y.sum())
    return (y + pool).cos() * pool.exp()


def test_a_write_stays_outside_and_reaches_the_input():
    compiled = cut(state, [rows(), torch.ones(3, 4, 8)])
    assert "it writes state" in said(compiled, "missed")
    assert said(compiled, "applied")


def swap(a, b):
    old = a.sin().cos()
    a.copy_(b)
    return old, (a * 2).exp()


def test_nothing_moves_across_a_write():
    compiled = cut(swap, [rows(), rows(seed=1)])
    targets = [n.op if n.op == "call_module" else str(n.target) for n in compiled.graphs[0].graph.nodes]
    assert targets.index("call_module") < targets.index("aten.copy_.default")


def views(x, w):
    y = (x @ w).relu()
    flat = y.view(-1)
    return flat, flat[3:], x.t(), (x.t() * 2).exp().t(), y.chunk(2)[1]


def test_no_view_leaves_an_island_and_memory_is_shared_as_before():
    compiled = cut(views, [rows(), W])
    (remark,) = compiled.remarks("applied", "islands")
    assert remark.detail.endswith("outputs float32[4, 8], float32[8, 4]")
    args = rows(), W
    flat, part, transposed, _, half = compiled(*args)
    assert flat.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    assert flat.untyped_storage().data_ptr() == half.untyped_storage().data_ptr()
    assert transposed.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


def test_a_view_of_an_input_between_two_islands_is_repeated_not_passed_on():
    def f(x, w, slots):
        flat = x.view(-1)
        normed = ops.l2_norm((x * 2).exp(), 1e-6)
        return (flat * 3).sin().sum() + normed, flat

    cut(f, [rows(), W, torch.tensor([1])])


def test_k3_ops_stay_and_their_neighbours_are_taken():
    def f(x, w):
        y = ops.rms_norm((x @ w).sigmoid(), w[0], 1e-5)
        return (y @ w).silu() if hasattr(y, "silu") else torch.nn.functional.silu(y @ w)

    compiled = cut(f, [rows(), W])
    assert said(compiled, "applied") == ["compiled by own"] * 2
    (remark,) = compiled.remarks("missed", "islands")
    assert (remark.reason, remark.detail) == ("it is a k3 op", "1 ops (k3.rms_norm)")


def test_data_dependent_sizes_keep_everything_out():
    compiled = cut(mlp, [rows(4), W], [rows(1), W], unbacked="L['x']:0")
    assert said(compiled, "applied") == []
    assert said(compiled, "missed") == ["a size depends on data"]


def test_random_numbers_are_drawn_outside_and_in_the_order_of_the_program():
    def f(x, w):
        y = x.sin().exp()
        first = torch.rand_like(y)
        second = torch.rand_like(x)
        z = ops.rms_norm(x, w, 1e-5).cos().tanh()  # could be one island with y, after the second draw
        return y, first, second, z

    compiled = Compiled(f, (Islands("own", own),))
    for seed in range(2):
        torch.manual_seed(seed)
        got = compiled(rows(), W[0])
        torch.manual_seed(seed)
        for a, b in zip(got, f(rows(), W[0]), strict=True):
            assert torch.equal(a, b)
    assert said(compiled, "applied") == ["compiled by own"] * 2
    assert said(compiled, "missed") == ["it draws random numbers", "it is a k3 op"]


def test_a_collective_stays_between_two_islands():
    from k3compile.runtime.parallel.ranks import group

    name = group()

    def f(x, w):
        y = torch.ops._c10d_functional.all_reduce(mlp(x, w), "sum", name)
        return mlp(torch.ops._c10d_functional.wait_tensor(y), w)

    compiled = cut(f, [rows(), W])
    assert said(compiled, "applied") == ["compiled by own"] * 2
    assert said(compiled, "missed") == ["it is a collective"]


def test_fuel_and_a_refusal_leave_the_nodes_where_they_are():
    def refuse(name, graph, inputs):
        raise IslandRefused("not today")

    dry = cut(mlp, [rows(), W], fuel=Fuel(0))
    assert said(dry, "missed") == ["no fuel"]
    refused = check(mlp, [rows(), W], passes=(Islands("own", refuse),))
    assert said(refused, "missed") == ["not today"]
    assert len(refused.targets()) == 4


@pytest.mark.parametrize("seed", thinned(range(30), 8))
def test_random_programs_keep_their_bits(seed):
    """Straight-line programs of pure ops, views, writes and k3 ops, returning some of what they made."""
    draw = torch.Generator().manual_seed(seed)

    def pick(n):
        return int(torch.randint(n, (1,), generator=draw))

    steps = [(pick(9), pick(99), pick(99)) for _ in range(14)]

    def program(a, b):
        made = [a, b]
        for what, i, j in steps:
            x, y = made[i % len(made)], made[j % len(made)]
            made.append(
                (
                    lambda x, y: x + y,
                    lambda x, y: x.t() @ y,
                    lambda x, y: x.view(-1).view(4, 4),
                    lambda x, y: x.t(),
                    lambda x, y: (x.sin() * y).relu(),
                    lambda x, y: ops.rms_norm(x.contiguous(), y[0].contiguous(), 1e-5),
                    lambda x, y: x.mul_(0.5),
                    lambda x, y: x[1:2].add_(y[:1] * 1).expand(4, 4) + 0,
                    lambda x, y: x.clone(),
                )[what](x, y) if x.is_contiguous() or what not in (2,) else x.clone()
            )  # fmt: skip
        return tuple(made[-4:])

    cut(program, [torch.randn(4, 4, generator=draw), torch.randn(4, 4, generator=draw)])

"""Programs far from a language model: the backend computes what eager computes."""

import pytest
import torch
import torch.utils.checkpoint
from lanes import thinned

pytestmark = pytest.mark.usefixtures("own_reports")


def branch(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def mutated_input_and_views_of_it(x):
    x.add_(1)
    return x[1:], x.t()


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def complex_numbers(x):
    return torch.fft.fft(x).real, torch.view_as_real(torch.fft.fft(x))


def random_numbers(x):
    return torch.nn.functional.dropout(x, 0.0), torch.rand(3) * 0


def inputs_and_constants_returned(x):
    return x, x.view(-1), 3, None


def sparse(x):
    return torch.sparse.mm(x.to_sparse(), x)


def jagged(x):
    return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).values()


def sizes_from_data(x):
    where = torch.nonzero(x > 0)
    return where.shape[0], x[where[:, 0], where[:, 1]]


def rows_written_in_a_loop(x):
    for k in range(3):
        x[k] = x[k - 1] * 2
    return x.sort(0).values


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False)


def functorch(x):
    return torch.func.vmap(lambda r: r @ r)(x), torch.func.grad(lambda y: (y**2).sum())(x)


def attention(x):
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])


def recurrent(x):
    torch.manual_seed(0)
    return RECURRENT(x)[0]


RECURRENT = torch.nn.LSTM(4, 4)
PROGRAMS = [
    branch, mutated_input_and_views_of_it, autocast, complex_numbers, random_numbers,
    inputs_and_constants_returned, sparse, jagged, sizes_from_data, rows_written_in_a_loop, checkpointed,
    functorch, attention, recurrent,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", thinned(PROGRAMS, 4), ids=lambda p: p.__name__)
def test_it_agrees_with_eager(program, dynamic):
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    torch._dynamo.reset()
    fn = torch.compile(program, backend="k3", dynamic=dynamic, options={"inner": "aot_eager"})
    with torch.no_grad():
        wanted, got = x.clone(), x.clone()
        for want, have in zip(
            torch.utils._pytree.tree_leaves(program(wanted)),
            torch.utils._pytree.tree_leaves(fn(got)),
            strict=True,
        ):
            assert torch.equal(want, have) if isinstance(want, torch.Tensor) else want == have
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("verify", ["off", "differential"])
def test_a_ragged_input_is_no_obstacle(verify):
    def f(x):
        return x * 2, x.offsets()

    torch._dynamo.reset()
    fn = torch.compile(f, backend="k3", options={"inner": "aot_eager", "verify": verify})
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    with torch.no_grad():
        doubled, offsets = fn(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert doubled.is_nested
    assert torch.equal(doubled.values(), torch.full((6, 3), 2.0))
    assert offsets.tolist() == [0, 2, 6]


def test_a_sparse_input_is_no_obstacle():
    x = torch.eye(4).to_sparse_csr()
    fn = torch.compile(lambda x: x @ torch.ones(4, 4), backend="k3", options={"inner": "aot_eager"})
    assert torch.equal(fn(x), torch.ones(4, 4))

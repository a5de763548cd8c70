"""What a rank does with its part: passes, changes of its pools in order, and which forward is in use."""

import pytest
import torch
from k3compile.kernels.choice import Chosen, by_meaning
from k3compile.kernels.native import best_isa, unavailable
from k3compile.runtime.cache.orders import Clear, Copy, Fold, Poison, PoisonAll
from k3compile.runtime.executor import Executor, on_device
from k3compile.runtime.step import Step
from small_models import Row, make_step, small_model


def some_pools(dtype=torch.float64):
    pools = small_model(dtype=dtype).make_pools(6, 5, 4, 3)
    for layer in pools:
        for number, tensor in enumerate(layer):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % (89 + number) / 89)
    return pools


def test_a_pass_gives_logits_of_the_asked_rows_and_says_what_happened_in_order():
    told = []

    def forward(step):
        told.append("forward")
        return torch.arange(8.0).view(4, 2), torch.ones(1)

    executor = Executor(pools := some_pools(), forward, lambda hidden: told.append("logits") or hidden * 2)
    before = pools[0].state[3].clone()
    got = executor.run(
        make_step([Row([5, 6, 7, 8], 1)]),
        torch.tensor([3, 0]),
        Copy([3], [4]),
        lambda step, taps: told.append(("observed", step.tokens.tolist(), taps.tolist())),
    )
    assert got.tolist() == [[12, 14], [0, 2]]
    assert told == ["forward", ("observed", [5, 6, 7, 8], [1.0]), "logits"]
    assert torch.equal(pools[0].state[4], before)


def test_where_nothing_is_sampled_the_head_is_not_asked():
    executor = Executor([], lambda step: (torch.zeros(2, 2), torch.empty(0)))
    assert executor.run(make_step([Row([5, 6], 1)]), torch.empty(0, dtype=torch.int64)) is None


def test_changes_happen_in_their_order():
    executor = Executor(pools := some_pools())
    kda = pools[0]
    third = kda.state[3].clone()
    executor.write([Copy([3], [4]), Poison([3], [2]), Clear([5]), Copy([5], [2])])
    assert torch.equal(kda.state[4], third)
    assert kda.state[3].isnan().all()
    assert not kda.state[2].any()
    pages = next(pool.pages for pool in pools if hasattr(pool, "pages"))
    assert pages[2].isnan().all()
    assert not pages[1].isnan().any()
    executor.write([PoisonAll()])
    assert all(tensor.isnan().all() for layer in pools for tensor in layer)


class Forward:
    """One that is compiled, as far as ops outside its layers go."""

    def __init__(self, lower):
        self.compute = Chosen(lower)


COMPUTED = {"uncompiled": None, "compiled": Forward({}), "by a wish": Forward({"kda_commit": "meaning"})}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("way", COMPUTED)
def test_a_fold_moves_the_states_of_all_layers_as_the_op_does(way, dtype):
    forward, (ours, theirs, before) = COMPUTED[way], (some_pools(dtype) for _ in range(3))
    Executor(ours, forward).write([Fold([(1, 2, 4), (1, 3, 1)]), Fold([])])
    moves = [torch.tensor(column) for column in ([1, 1], [2, 3], [4, 1])]
    here = dtype == torch.float32 and best_isa() != "portable" and unavailable("kda_fold") is None
    native = here and way == "compiled"
    commit = torch.ops.k3.kda_commit.native if native else torch.ops.k3.kda_commit
    for layer in theirs:
        if hasattr(layer, "state"):
            commit(*(t[None] for t in layer), *moves)
    assert all(torch.equal(a, b) for x, y in zip(ours, theirs) for a, b in zip(x, y))
    assert not any(torch.equal(x.state, y.state) for x, y in zip(ours, before) if hasattr(x, "state"))
    if forward:
        assert forward.compute.said["kda_commit"].startswith(
            f"computed by {'native' if native else 'its meaning'}"
        )


def test_a_model_without_states_has_nothing_to_fold():
    Executor(some_pools()[3:4], own=[]).write([Fold([(1, 2, 1)])])


def test_a_block_is_drafted_with_what_the_forward_chooses():
    class Blocks:
        def run(self, *given):
            return given

    places = torch.tensor([5]), torch.tensor([3]), torch.tensor([[1]])
    executor = Executor([], blocks=Blocks())
    assert executor.draft(*places)[3] is by_meaning
    executor.use(forward := Forward({}))
    assert executor.draft(*places)[3] is forward.compute
    assert all(map(torch.equal, executor.draft(*places)[:3], places))


def test_a_forward_keeps_its_number_and_the_last_one_given_is_used():
    first, second = (lambda step: None), (lambda step: None)
    second.exports = True
    executor = Executor([], first)
    assert (executor.number, executor.exports) == (0, False)
    executor.use(second)
    assert (executor.forward, executor.number, executor.exports) == (second, 1, True)
    executor.use(first)
    assert (executor.forward, executor.number, len(executor.forwards)) == (first, 0, 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_spans_stay_where_they_are(device):
    step = make_step([Row([5, 6], 1)])
    moved = on_device(step, torch.device(device))
    assert {n for n, t in zip(Step._fields, moved) if t.device.type == "cpu"} >= {"spans"}
    assert moved.tokens.device.type == device
    assert (moved is step) == (device == "cpu")

"""Zeros for those who come, copies of kept states, NaN for those who went, nothing anywhere else."""

import torch
from k3compile.runtime.cache import writes
from k3compile.runtime.cache.orders import Clear, Copy, Poison


def filled(toy):
    pools = toy.Model().make_pools(4, 5, 2, 1)
    for layer in pools:
        for tensor in layer:
            tensor.fill_(7.0)
    return pools


def test_clearing_zeroes_state_and_window_of_the_slot_alone(toy):
    kda, mla = pools = filled(toy)
    writes.apply(pools, [Clear([2])])
    for tensor in (kda.state, kda.window):
        assert (tensor[2] == 0).all()
        assert (tensor[[0, 1, 3]] == 7).all()
    assert all((t == 7).all() for t in (kda.rec_u, kda.rec_k, kda.rec_g, kda.rec_x, mla.pages))


def test_poison_reaches_every_tensor_of_the_slot_and_page_alone(toy):
    kda, mla = pools = filled(toy)
    writes.apply(pools, [Poison([3], [1, 4])])
    for tensor in kda:
        assert tensor[3].isnan().all()
        assert (tensor[:3] == 7).all()
    assert mla.pages[[1, 4]].isnan().all()
    assert (mla.pages[[0, 2, 3]] == 7).all()


def test_a_slot_freed_and_taken_again_ends_up_cleared(toy):
    kda, _ = pools = filled(toy)
    writes.apply(pools, [Poison([1], []), Clear([1])])
    assert (kda.state[1] == 0).all()
    assert (kda.window[1] == 0).all()
    assert kda.rec_u[1].isnan().all()


def test_views_of_one_big_tensor_are_written_through():
    from k3compile.runtime.cache.pools import KdaPools

    big = torch.full((2, 3, 4), 7.0)  # layers, slots, values
    layers = [KdaPools(*[big[i]] * 6) for i in range(2)]
    writes.apply(layers, [Clear([1])])
    assert (big[:, 1] == 0).all()
    assert (big[:, [0, 2]] == 7).all()


def test_a_copy_takes_state_and_window_and_no_records(toy):
    kda, mla = pools = filled(toy)
    kda.state[1], kda.window[1] = 5.0, 6.0
    writes.apply(pools, [Copy([1, 3], [2, 1])])
    assert (kda.state[2] == 5).all()
    assert (kda.window[2] == 6).all()
    assert (kda.state[1] == 7).all()
    assert all((t == 7).all() for t in (kda.rec_u, kda.rec_k, kda.rec_g, kda.rec_x, mla.pages))


def test_orders_are_carried_out_one_after_the_other(toy):
    kda, _ = pools = filled(toy)
    writes.apply(pools, [Clear([1]), Copy([1], [2]), Poison([1], []), Copy([2], [3])])
    assert kda.state[1].isnan().all()
    assert (kda.state[[2, 3]] == 0).all()


def test_in_the_beginning_everything_is_nan(toy):
    pools = filled(toy)
    writes.poison_all(pools)
    assert all(t.isnan().all() for layer in pools for t in layer)

"""Pools name their tensors in the order the clearing and the model rely on."""

from k3compile.runtime.cache.pools import KdaPools, MlaPools


def test_slots_and_pages_are_the_first_dimension_of_every_pool(toy):
    kda, mla = toy.Model().make_pools(5, 7, 4, 2)
    assert {t.shape[0] for t in kda} == {5}
    assert {t.shape[0] for t in mla} == {7}
    assert KdaPools._fields == ("state", "window", "rec_u", "rec_k", "rec_g", "rec_x")
    assert MlaPools._fields == ("pages",)

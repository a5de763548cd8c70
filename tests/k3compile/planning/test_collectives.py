"""The number of collectives and their bytes are those of a real pass over two ranks."""

import dataclasses

import pytest
import torch
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import world
from small_models import SMALL, Row, make_step
from threaded_ranks import on_threads
from torch.utils._python_dispatch import TorchDispatchMode

from k3compile.planning.collectives import exchanged
from k3compile.planning.released import read_model

EVEN = dataclasses.replace(SMALL, kda_num_heads=4, num_attention_heads=4, moe_intermediate_size=128)


class Count(TorchDispatchMode):
    """Collectives by name, and the bytes given to all-reduces."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            name = func._schema.name.split("::")[1]
            self.calls[name] = self.calls.get(name, 0) + 1
            if name == "all_reduce":
                self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def counted(config, context: int = 1):
    """What one step of four rows, of which two are asked for, exchanges on two ranks."""

    def work(rank):
        model = Model(config, torch.float32, ranks=world(context))
        for parameter in model.parameters():
            parameter.zero_()
        pools = model.make_pools(2, 2, 16)
        with Count() as count:
            hidden, _ = model.forward(make_step([Row([1, 2, 3, 4], slot=1, pages=(1,))]), pools)
            model.logits(hidden[:2])
        return count

    return on_threads(2, work)


def test_a_real_pass_exchanges_what_is_planned():
    wanted = exchanged(EVEN, 4)
    for count in counted(EVEN):
        assert count.calls == {
            "all_reduce": wanted.all_reduces,
            "all_gather_into_tensor": wanted.all_gathers,
        }
        assert count.bytes == 4 * wanted.row_bytes


def test_context_groups_exchange_queries_and_what_they_found():
    wanted = exchanged(EVEN, 4, 2)
    assert wanted.all_to_alls == 4
    for count in counted(EVEN, context=2):
        assert count.calls == {
            "all_reduce": wanted.all_reduces,
            "all_gather_into_tensor": wanted.all_gathers,
            "all_to_all_single": wanted.all_to_alls,
        }


def test_kimi_k3_has_279_all_reduces_and_one_gather():
    wanted = exchanged(read_model("kimi-k3"), 2)
    assert (wanted.all_reduces, wanted.all_gathers) == (279, 1)
    assert wanted.row_bytes == (187 * 7168 + 92 * 3584) * 2
    assert wanted.asked_bytes == 163840 * 2


@pytest.mark.parametrize("dense", [0, 3])
def test_a_dense_layer_has_one_and_not_two(dense):
    config = dataclasses.replace(EVEN, first_k_dense_replace=dense)
    layers = config.num_hidden_layers
    assert exchanged(config, 4).all_reduces == 1 + layers + 2 * (layers - dense) + dense

"""In a context group data decides what goes and what comes; for one mix it is known."""

import pytest
import torch
from graph_snapshots import graph, node, ref, tensor
from k3compile.kernels.mla_gather import STRETCH
from k3compile.kernels.mla_gather import stretches as of_kernel
from k3compile.kernels.mla_shard import Row

from k3compile.dry_run.contexts import contexts, stretches
from k3compile.dry_run.mix import Mix, Rows

WIDTH, PAGE = 576, 8  # of a row of latents; rows of a page that one rank has of eight's 64


def call(id, target, args, value=None):
    return node(id, "call_function", target, args, value or tensor(id))


def attention(query, token):
    """The nodes that matter of an attention whose rows cost so many bytes."""
    pages = tensor(1, (2, PAGE, WIDTH), "bfloat16", [PAGE * WIDTH, WIDTH, 1])
    return graph([
        node(0, "placeholder", "seen", value=tensor(0)),
        node(1, "placeholder", "pages", value=pages),
        call(2, "k3.exchanged_rows.default", [ref(0), ref(0), query, token]),
        call(3, "aten._local_scalar_dense.default", [ref(2)], {"sym": "u8"}),
        call(4, "k3.mla_attend_gathered.default", [ref(0), ref(0), ref(0), ref(1), *[ref(0)] * 4, "0", 1]),
    ])  # fmt: skip


def test_dear_queries_stay_and_contexts_come_to_them():
    mix = Mix(Rows(2, 8), 3, Rows(2, 100), context=STRETCH + 9)
    found = contexts(attention(query=300_000, token=1152), mix, dcp=8)
    assert found.sizes == {"u8": 2 * 8 + 3}  # the prefills' queries cost more than their contexts
    assert found.collectives == 2 * 2  # two stretches for each of two prefills
    assert found.sent == 2 * (STRETCH // 8 + 2) * WIDTH * 2
    assert (found.ops, found.bound) == (1, 7 * 66 * PAGE * WIDTH * 2)  # 4105 and 100 tokens: 66 pages


def test_cheap_queries_all_go():
    found = contexts(attention(query=1, token=1152), Mix(), dcp=8)
    assert found.sizes == {"u8": 64}
    assert (found.collectives, found.sent) == (0, 0)


def test_a_graph_that_shares_no_context_has_nothing():
    found = contexts(graph([node(0, "placeholder", "x", value=tensor(0))]), Mix(), dcp=1)
    assert found == ({}, 0, 0, 0, 0)


@pytest.mark.parametrize(("context", "together"), [(9, 1), (5000, 4), (8192, 1), (0, 2)])
def test_stretches_are_those_of_the_kernel(context, together):
    pages = torch.zeros(2, 4 * STRETCH, 1)
    table, place = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 1, together])
    came = [len(part) for part in of_kernel(pages, table, Row(0, 0, 1, context), place, "")]
    assert sum(came) == context
    assert stretches(context, 1, together) == [-(-part // together) * together for part in came]


def test_ranks_give_equal_parts_of_a_stretch():
    assert stretches(STRETCH + 9, 8, 1) == [STRETCH // 8, 2]  # of nine tokens one rank has two
    assert stretches(5, 2, 4) == [4]

"""What a graph does through an index is counted by who made it."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.dry_run.counts import counts, sent

ROWS = node(0, "placeholder", "x", value=tensor(0))
INDEX = node(1, "placeholder", "i", value=tensor(1, ("s0", 1), "int64"))


def call(id, target, args, module=None, value=None, **more):
    return node(id, "call_function", target, args, value or tensor(id), module=module, **more)


def test_moves_of_attention_are_not_those_of_experts_or_of_the_embedding():
    experts = call(2, "k3.experts_unfinalized.default", [ref(0)], "ffn.experts", [tensor(2), tensor(3)])
    rows = call(3, "operator.getitem", [ref(2), 0], "ffn.experts")
    wide = call(4, "aten._to_copy.default", [ref(3)], "ffn")
    nodes = [
        *(ROWS, INDEX, experts, rows, wide),
        call(5, "aten.index_select.default", [ref(4), 0, ref(1)], "ffn"),
        call(6, "aten.index_select.default", [ref(0), 0, ref(1)], "layers.3.self_attn"),
        call(7, "aten.index_copy.default", [ref(0), 0, ref(1), ref(6)], "self_attn"),
        call(8, "aten.index_select.default", [ref(0), 0, ref(1)], "self_attention_res"),
        call(9, "aten.embedding.default", [ref(0), ref(1)], None),
        call(10, "aten.index_put.default", [ref(0), [ref(1)], ref(6)], None),
    ]
    found = counts(graph(nodes))
    assert (found.rows, found.finalizes, found.embeddings, found.others) == (2, 1, 1, 2)


def test_a_tail_that_reads_the_rows_leaves_no_finalize():
    experts = call(2, "k3.experts_unfinalized.default", [ref(0)], "ffn", [tensor(2), tensor(3)])
    rows = call(3, "operator.getitem", [ref(2), 0], "ffn")
    tail = call(4, "k3.latent_tail.tiers", [ref(3), ref(0), ref(1)], "ffn")
    found = counts(graph([ROWS, INDEX, experts, rows, tail]))
    assert (found.tails, found.finalizes) == (1, 0)


def test_exports_are_counted_functional_or_not():
    functional = "ops.higher_order.auto_functionalized_v2"
    nodes = [
        ROWS,
        call(1, functional, [{"op": "k3.kda_prefill_export_into.default"}], "self_attn"),
        call(2, functional, [{"op": "k3.kda_prefill.default"}], "self_attn"),
        call(3, "_ops.k3.short_conv_export", [ref(0)], "self_attn"),
    ]
    assert counts(graph(nodes)).exports == 2


def test_collectives_are_named_once_with_what_they_send():
    nodes = [
        ROWS,
        call(1, "_c10d_functional.all_reduce.default", [ref(0), "sum", "0"]),
        call(2, "_c10d_functional.wait_tensor.default", [ref(1)]),
        call(3, "_c10d_functional.all_gather_into_tensor.default", [ref(2), 8, "0"]),
    ]
    assert counts(graph(nodes)).collectives == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert [(op, shape, dtype) for op, shape, dtype in sent(graph(nodes))] == [
        ("_c10d_functional.all_reduce.default", ("s0", 8), "float32"),
        ("_c10d_functional.all_gather_into_tensor.default", ("s0", 8), "float32"),
    ]

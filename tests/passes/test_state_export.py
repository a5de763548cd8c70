"""Every call of an op with an export twin becomes the twin, with inputs that all of them share."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.passes.extra_inputs import ExtraInput
from k3compile.passes.runner import Context, Fuel, run_passes
from k3compile.passes.state_export import STATE_EXPORT

ops = torch.ops.k3
H, K, V, C, SLOTS = 2, 4, 6, 5, 7


def captured(fn, *args):
    """Dynamo's graph of ``fn``."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def exported(gm, **context):
    """The graph after the pass, statically verified, with its remarks and added inputs."""
    ctx = Context("dynamo", verify="static", **context)
    (record,) = run_passes(gm, (STATE_EXPORT,), ctx)
    return gm, record.remarks, ctx.extra_inputs


def targets(gm):
    return [str(n.target).removeprefix("k3.") for n in gm.graph.nodes if "k3." in str(n.target)]


def slot_arguments(layers=2):
    """x, conv weight and the pools of each layer, slots, cu."""
    x, weight = torch.randn(9, C), torch.randn(C, 4)
    pools = [(torch.zeros(SLOTS, H, V, K), torch.zeros(SLOTS, 3, C)) for _ in range(layers)]
    return x, weight, pools, torch.tensor([1, 2]), torch.tensor([0, 4, 9])


def heads(y):
    """Something of the right shapes for KDA, out of [..., C]."""
    wide = y.sum(-1, keepdim=True).unsqueeze(-1)
    q, v = wide.expand(*y.shape[:-1], H, K), wide.expand(*y.shape[:-1], H, V)
    return q, q, v, -q.abs(), wide.squeeze(-1).expand(*y.shape[:-1], H).sigmoid()


def with_slots(x, weight, pools, slots, cu):
    total = 0.0
    for place, (state, window) in enumerate(pools):
        y = ops.short_conv(x, weight, window, slots, cu)
        prefill = ops.kda_prefill.default if place else ops.kda_prefill
        total = total + prefill(*heads(y), state, slots, cu=cu)
    return total


def with_sequences(x, weight, initials):
    outs = []
    for state, window in initials:
        y, after = ops.conv_scan(x, weight, window)
        scan = ops.kda_scan.default if outs else ops.kda_scan
        o, final = scan(*heads(y), state)
        outs += [after, o, final]
    return outs


def sequence_arguments(*shapes):
    states = [(torch.zeros(*shape, V, K), torch.zeros(shape[0], 3, C)) for shape in shapes or ((2, H),) * 2]
    return torch.randn(2, 9, C), torch.randn(C, 4), states


def test_calls_by_packet_and_by_overload_become_their_twins_and_share_two_inputs():
    gm = captured(with_slots, *slot_arguments())
    inputs = len(gm.graph.find_nodes(op="placeholder"))
    gm, remarks, extras = exported(gm, export_rows=11)
    assert targets(gm) == ["short_conv_export", "kda_prefill_export"] + [
        "short_conv_export",
        "kda_prefill_export.default",
    ]
    assert [(e.name, e.key) for e in extras] == [("export_offset", "export_offset"), ("export_slot",) * 2]
    assert all(e.example.shape == (11,) and e.example.dtype == torch.int32 for e in extras)
    placeholders = gm.graph.find_nodes(op="placeholder")
    assert [n.name for n in placeholders[inputs:]] == ["export_offset", "export_slot"]
    for node in gm.graph.nodes:
        if "k3." in str(node.target):
            assert node.args[-2:] == tuple(placeholders[inputs:])
    assert [(r.kind, r.op) for r in remarks] == [
        ("applied", "k3.short_conv"),
        ("applied", "k3.kda_prefill"),
    ] * 2
    assert all(__file__ in r.source for r in remarks)
    assert remarks[1].expected == {"launches": 0, "bytes": f"{2 * H * V * K * 4} * exported_rows"}


def test_the_changed_graph_computes_the_same_and_exports():
    args, same = slot_arguments(), slot_arguments()
    same = (*args[:2], [tuple(t.clone() for t in p) for p in args[2]], *args[3:])
    gm, _, _ = exported(captured(with_slots, *same), export_rows=4)
    order = [n.meta["example_value"].shape for n in gm.graph.find_nodes(op="placeholder")]
    want = with_slots(*args)
    flat = [args[0], args[1], args[2][0][1], args[3], args[4], args[2][0][0], args[2][1][1], args[2][1][0]]
    fresh = [t.clone() if t.dim() > 2 else t for t in flat]
    for t in fresh:
        if t.dim() > 2:
            t.zero_()
    assert [t.shape for t in fresh] == order[: len(fresh)]
    offset, slot = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 0, 0], [0, 6, 0, 0]))
    with torch.no_grad():
        (got,) = gm(*fresh, offset, slot)
    assert torch.equal(got, want)
    for pool, live in zip((fresh[2], fresh[5]), args[2][0][::-1]):
        assert torch.equal(pool[:6], live[:6])
        assert pool[6].any(), "the checkpoint is there"


def test_ops_without_slots_export_to_a_row_of_a_pool_of_their_family():
    gm, remarks, extras = exported(captured(with_sequences, *sequence_arguments()))
    assert targets(gm) == ["conv_scan_export", "kda_scan_export"] + [
        "conv_scan_export",
        "kda_scan_export.default",
    ]
    assert [(e.key, tuple(e.example.shape)) for e in extras] == [
        ("export_sequence_offset", (2,)),
        ("export_pool:conv_scan", (2, 2, 3, C)),
        ("export_pool:kda_scan", (2, 2, H, V, K)),
    ]
    calls = [n for n in gm.graph.nodes if "k3." in str(n.target)]
    assert [n.args[-1] for n in calls] == [0, 0, 1, 1], "a site's number counts the calls of its family"
    assert [n.args[-2].name for n in calls] == ["export_pool_conv_scan", "export_pool_kda_scan"] * 2
    assert all(r.kind == "applied" for r in remarks)


def test_a_site_of_another_shape_is_missed_and_the_pool_has_no_row_for_it():
    def three(x, weight, initials):
        return [ops.kda_scan(*heads(x), state)[1] for state, _ in initials]

    x, weight, states = sequence_arguments((2, H), (2, H), (2, H))
    states[1] = (torch.zeros(2, H, V, K, dtype=torch.float64), states[1][1])
    gm, remarks, extras = exported(captured(three, x, weight, states))
    assert [r.kind for r in remarks] == ["applied", "missed", "applied"]
    assert "the state is float64[2, 2, 6, 4], that of" in remarks[1].reason
    assert targets(gm) == ["kda_scan_export", "kda_scan", "kda_scan_export"]
    assert extras[-1].example.shape[0] == 2
    assert [n.args[-1] for n in gm.graph.nodes if "export" in str(n.target) and n.op != "placeholder"] == [
        0,
        1,
    ]


def test_a_batch_of_no_fixed_size_is_missed():
    x, weight, states = sequence_arguments((3, H))
    x = torch.randn(3, 9, C)
    for t in (x, *states[0]):
        torch._dynamo.mark_dynamic(t, 0)
    gm, remarks, extras = exported(captured(with_sequences, x, weight, states))
    assert [r.kind for r in remarks] == ["missed", "missed"]
    assert "has no fixed size" in remarks[0].reason
    assert extras == []
    assert "export" not in " ".join(targets(gm))


@pytest.mark.parametrize("units", [0, 1, 3])
def test_fuel_stops_it_between_two_sites(units):
    gm, remarks, _ = exported(captured(with_slots, *slot_arguments()), fuel=Fuel(units))
    assert [r.kind for r in remarks] == ["applied"] * units + ["missed"] * (4 - units)
    assert sum("export" in t for t in targets(gm)) == units
    assert {r.reason for r in remarks if r.kind == "missed"} == {"stopped by fuel or by the bisector"}


def test_a_graph_without_such_calls_is_left_as_it_is():
    gm = captured(lambda x: ops.rms_norm(x, torch.ones(5), 1e-5) + 1, torch.randn(3, 5))
    code = gm.code
    gm, remarks, extras = exported(gm)
    assert (gm.code, remarks, extras) == (code, (), [])
    assert all(not isinstance(e, ExtraInput) for e in extras)


def test_a_site_may_read_what_an_earlier_site_made():
    def chained(x, weight, window, slots, cu):
        once = ops.short_conv(x, weight, window[0], slots, cu)
        return ops.short_conv(once, weight, window[1], slots, cu)

    x, weight, pools, slots, cu = slot_arguments()
    gm, remarks, _ = exported(captured(chained, x, weight, [window for _, window in pools], slots, cu))
    assert [r.kind for r in remarks] == ["applied", "applied"]
    first, second = (n for n in gm.graph.nodes if "short_conv_export" in str(n.target))
    assert second.args[0] is first

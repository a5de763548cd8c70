"""One Dynamo graph with two bodies: each call gets the one its annotations allow, and the right result."""

from dataclasses import replace

import annotated_layer
import pytest
import torch
from compiled import copies
from k3compile.passes.multi_version import GENERIC, RANGES, RangeInput
from mixed_batch import MIXES

from k3compile import report, versions
from k3compile.annotations import annotate_range, forget

pytestmark = pytest.mark.usefixtures("own_reports")
SLOW = [pytest.mark.inductor, pytest.mark.slow]
# What is computed by C++ on a CPU rounds otherwise; bits are compared with the ops' meaning.
MEANT = {f"kda_prefill{twin}": "meaning" for twin in ("", "_into", "_export", "_export_into")}
INNERS = ["eager", "aot_eager", pytest.param("inductor", marks=SLOW)]


@pytest.fixture(autouse=True)
def no_promises():
    forget()
    yield
    forget()


@pytest.fixture
def bodies(monkeypatch):
    """The names of the bodies in the order they were called."""
    called = []
    real = versions.pick

    def named(name, body):
        return lambda *args: (called.append(name), body(*args))[1]

    monkeypatch.setattr(versions, "pick", lambda g, r, i: real(named(GENERIC, g), named(RANGES, r), i))
    return called


class Calls:
    """``fn`` compiled; counts its Dynamo graphs and compares every call with eager."""

    def __init__(self, fn, unbacked, exact=True, **options):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.fn, self.unbacked, self.exact = fn, unbacked, exact
        if exact:
            options["lower"] = MEANT
        self.compiled = torch.compile(fn, backend="k3", fullgraph=True, options=options)

    def __call__(self, *args):
        """Call with ``args`` as they are, since promises are about tensors; eager gets copies."""
        theirs = copies(args)
        with torch.no_grad(), torch.compiler.config.patch(unbacked_sources=self.unbacked):
            got = self.compiled(*args)
            want = self.fn(*theirs)
        for a, b in zip([got, *args], [want, *theirs], strict=True):
            assert torch.equal(a, b) if self.exact else torch.allclose(a, b, atol=1e-5, rtol=1e-4)
        return got

    @property
    def graphs(self):
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def stale(args, ranges):
    """Both indices promised, then the second written: its rows are reversed, and so is the result."""
    annotated_layer.annotated(args, ranges)
    args[-1].copy_(args[-1].flip(0))
    return args


STATES = {
    "annotated": (annotated_layer.annotated, RANGES),
    "unannotated": (lambda args, ranges: args, GENERIC),
    "stale": (stale, GENERIC),
}


FIRST = [("aot_eager", "annotated")]
LATER = [(i, n) for i in ("eager", "aot_eager") for n in STATES if (i, n) not in FIRST]
LATER = [
    *(pytest.param(*one, marks=pytest.mark.slow) for one in LATER),
    pytest.param("inductor", "stale", marks=SLOW),
]


@pytest.mark.parametrize(("inner", "first"), [*FIRST, *LATER])
def test_every_mix_gets_the_body_its_annotations_allow_from_one_graph(bodies, inner, first):
    annotate_range(torch.arange(1), 0, 1)  # a process that annotates, whatever comes first
    order = [first, *(name for name in STATES if name != first)]
    calls = Calls(annotated_layer.layer, annotated_layer.UNBACKED, exact=inner != "inductor", inner=inner)
    expected = []
    for number, mix in enumerate(MIXES):
        for name in order:
            prepare, body = STATES[name]
            calls(*prepare(*annotated_layer.arguments(*mix, seed=number)))
            expected.append(body)
    assert bodies == expected
    assert calls.graphs == 1
    assert len(MIXES) >= 8


def test_eight_index_operations_of_a_kda_layer_become_none_in_the_ranges_body():
    args = annotated_layer.annotated(*annotated_layer.arguments(*MIXES[0]))
    Calls(annotated_layer.layer, annotated_layer.UNBACKED, inner="aot_eager")(*args)
    made = report.latest()
    sites = {}
    for record in made.records:
        if record.name == "contiguous_views":
            sites[record.body] = [(r.kind, r.op, r.reason) for r in record.remarks]
    print(
        f"index sites of the layer: {len(sites[GENERIC])}, left in the ranges body: "
        f"{sum(kind == 'missed' for kind, _, _ in sites[RANGES])}"
    )
    assert sites[GENERIC] == [
        *[("missed", "aten.index_select", "index comes from a graph input (R1)")] * 6,
        *[("missed", "aten.index_copy", "index comes from a graph input (R1)")] * 2,
    ]
    assert [kind for kind, _, _ in sites[RANGES]] == ["applied"] * 8
    scatters = [r for r in made.remarks if r.kind == "applied" and r.op == "aten.index_copy"]
    assert all("writes rows" in r.detail for r in scatters), "the ops write the buffer themselves"
    (note,) = [note for note in made.notes if "two bodies" in note]
    assert "verify_rows, other_rows" in note
    assert "contiguous_views, body for annotated ranges" in made.text()
    proofs = {p.obligation: p.how for r in made.remarks if r.kind == "applied" for p in r.proofs}
    assert proofs["index is a range"] == "annotation"
    assert proofs["end <= size"] == "torch._check"


def gathered(x, i):
    return x.index_select(0, i) * 2


ROWS = "L['x']:0,L['i']:0"


def table(rows=8):
    return torch.arange(float(rows * 3)).view(rows, 3)


def test_an_int32_index_is_proven_to_fit_by_its_promise(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager")
    calls(table(), annotate_range(torch.arange(2, 5, dtype=torch.int32), 2, 5))
    assert bodies == [RANGES]
    assert report.latest().applied("contiguous_views") == 1


def test_a_process_that_never_annotates_compiles_one_body_and_says_how_to_get_the_other(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager")
    calls(table(), torch.arange(2, 5))
    (remark,) = [r for r in report.latest().remarks if r.pass_name == "contiguous_views"]
    assert remark.reason == "index comes from a graph input (R1)"
    assert remark.fix_it.startswith(
        "annotate it with k3compile.annotate_range(index, start, end) before the first call"
    )
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    assert not bodies, "there is one body, and it is right for every index"
    assert calls.graphs == 1


def test_an_index_written_after_its_promise_is_read_as_it_is(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager")
    index = annotate_range(torch.arange(2, 5), 2, 5)
    calls(table(), index)
    index[0] = 7
    got = calls(table(), index)
    assert torch.equal(got, table()[[7, 3, 4]] * 2)
    assert bodies == [RANGES, GENERIC]


@pytest.mark.parametrize("inner", INNERS)
def test_rows_past_the_end_raise_and_are_never_clamped(inner):
    calls = Calls(gathered, ROWS, inner=inner)
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    with pytest.raises((RuntimeError, IndexError)):
        calls.compiled(table(), annotate_range(torch.arange(6, 9), 6, 9))
    calls(table(9), annotate_range(torch.arange(6, 9), 6, 9))


def test_an_empty_range_lies_anywhere(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager")
    for at in (0, 3, 800):
        calls(table(), annotate_range(torch.arange(at, at), at, at))
    assert bodies == [RANGES] * 3


@pytest.mark.parametrize("first", [True, False])
def test_only_indices_annotated_at_the_first_call_are_taken_for_ranges(bodies, first):
    def f(x, i, j):
        return x.index_select(0, i) * 2 + x.index_select(0, j)

    def args(annotate_j):
        i, j = torch.arange(3), torch.tensor([4, 2, 7])
        if annotate_j:
            j = annotate_range(torch.arange(3, 6), 3, 6)
        return table(), annotate_range(i, 0, 3), j

    calls = Calls(f, "L['x']:0,L['i']:0,L['j']:0", inner="aot_eager")
    calls(*args(first))
    calls(*args(not first))
    assert bodies == ([RANGES, GENERIC] if first else [RANGES, RANGES])


def test_values_are_compared_with_the_promise_where_that_is_asked_for():
    calls = Calls(gathered, ROWS, inner="aot_eager", range_source="check")
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    calls(table(), torch.tensor([4, 4, 1]))
    calls(table(), annotate_range(torch.arange(0), 5, 5))
    with pytest.raises(
        ValueError, match=r"i was annotated as the rows \[2, 5\), but element 1 is 7 and not 3"
    ):
        calls.compiled(table(), annotate_range(torch.tensor([2, 7, 4]), 2, 5))


def test_the_values_are_compared_without_a_second_body_too():
    calls = Calls(gathered, ROWS, inner="aot_eager", range_source="check")
    calls(table(), torch.tensor([4, 4, 1]))
    with pytest.raises(ValueError, match="i was annotated"):
        calls.compiled(table(), annotate_range(torch.tensor([2, 7, 4]), 2, 5))


def test_annotations_are_not_read_where_ranges_must_be_proven(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager", range_source="prove")
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    assert not bodies
    assert not [note for note in report.latest().notes if "bodies" in note]


def test_a_graph_with_two_bodies_is_another_artifact():
    keys = []
    for annotate in (False, True):
        index = torch.arange(2, 5)
        if annotate:
            annotate_range(index, 2, 5)
        Calls(gathered, ROWS, inner="aot_eager")(table(), index)
        keys.append(report.latest().key)
    one, two = keys
    assert one.split("-")[0] == two.split("-")[0], "the same graph"
    assert one != two


def test_a_graph_with_two_bodies_is_not_said_to_be_what_the_inner_compiler_alone_makes():
    calls = Calls(lambda x, i: x.index_select(0, i), "L['x']:0,L['i']:0", inner="aot_eager")
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))  # returned, so it has to be a copy (R4)
    assert report.latest().applied("contiguous_views") == 0
    assert report.latest().reason == ""


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("inner", INNERS)
def test_ranges_are_used_where_dynamo_may_break_its_graph_too(bodies, inner, dynamic, fresh_cache):
    def f(x, i):
        y = x + 1
        torch._dynamo.graph_break()
        return y.index_select(0, i) * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="k3", dynamic=dynamic, options={"inner": inner})
    with torch.no_grad():
        for index in (annotate_range(torch.arange(2, 5), 2, 5), torch.tensor([4, 2, 0])):
            assert torch.equal(compiled(table(), index), f(table(), index))
    assert bodies == [RANGES, GENERIC]
    assert report.latest().applied("contiguous_views") == 1


def test_the_ranges_body_alone_may_read_its_first_rows_from_data():
    def f(x, i):
        return x.index_select(0, i) * 2, x.sum().item()

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="k3", options={"inner": "aot_eager"})
    with torch.no_grad():
        rows, total = compiled(table(), annotate_range(torch.arange(2, 5), 2, 5))
    assert torch.equal(rows, table()[2:5] * 2)
    assert total == table().sum().item()


def test_promises_about_a_buffer_and_nested_arguments_end_when_these_are_written_or_replaced(bodies):
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", annotate_range(torch.arange(2, 5), 2, 5))

        def forward(self, x, more):
            return x.index_select(0, self.rows) * 2, x.index_select(0, more["rows"][0]) * 2

    torch._dynamo.reset()
    module, more = Reads(), {"rows": (annotate_range(torch.arange(3), 0, 3),)}
    compiled = torch.compile(module, backend="k3", options={"inner": "aot_eager"})

    def agrees():
        got, want = compiled(table(), more), module(table(), more)
        return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    with torch.no_grad():
        assert agrees()
        assert report.latest().applied("contiguous_views") == 2
        module.rows.copy_(torch.tensor([7, 7, 0]))
        assert agrees()
        module.rows = torch.tensor([1, 0, 7])
        assert agrees()
    assert bodies[0] == RANGES
    assert RANGES not in bodies[1:]


def test_one_index_given_twice_and_rows_written_where_others_are_read(bodies):
    def f(x, i, j):
        x.index_copy_(0, i, x.index_select(0, j))
        return x.index_select(0, i) + x.index_select(0, j)

    calls = Calls(f, "L['x']:0,L['i']:0,L['j']:0", inner="aot_eager")
    for first, second in ((0, 1), (2, 1), (4, 0)):
        ranges = [annotate_range(torch.arange(n, n + 3), n, n + 3) for n in (first, second)]
        calls(table(), *ranges)
    calls(table(), ranges[0], ranges[0])
    calls(table(), torch.tensor([0, 1, 5]), ranges[1])
    assert set(bodies) == {RANGES, GENERIC}


def test_a_pass_that_is_off_needs_no_second_body(bodies):
    calls = Calls(gathered, ROWS, inner="aot_eager", disable=("contiguous_views",))
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    assert not bodies


def test_facts_of_annotations_do_not_reach_the_body_for_any_index(bodies):
    def f(x, i):
        return x.index_select(0, torch.arange(i.shape[0])) * 2 + x.index_select(0, i)

    calls = Calls(f, ROWS, inner="aot_eager")
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    reasons = [
        r.reason
        for rec in report.latest().records
        if rec.body == GENERIC
        for r in rec.remarks
        if r.kind == "missed"
    ]
    assert "unproven: end <= size (R2)" in reasons, "only the other body was told that the index fits"
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        calls.compiled(table(2), torch.zeros(3, dtype=torch.int64))


def test_first_rows_are_given_only_when_all_are_promised():
    indices = [RangeInput(0, "i"), RangeInput(2, "j")]
    i, j = annotate_range(torch.arange(3, 5), 3, 5), torch.arange(1)
    assert versions.starts_of(indices, (i, "x", j)) is None
    assert versions.starts_of(indices, (i, "x", annotate_range(j, 0, 1))).tolist() == [3, 0]


def test_a_body_that_a_cache_answered_for_is_told_of_in_the_stored_words():
    calls = Calls(gathered, ROWS, inner="aot_eager")
    calls(table(), annotate_range(torch.arange(2, 5), 2, 5))
    whole = report.latest()
    half = replace(
        whole, records=tuple(r for r in whole.records if r.body != GENERIC), graphs=whole.graphs[2:]
    )
    assert not half.missed("contiguous_views")
    again = versions.completed(half, whole)
    assert again.missed("contiguous_views") == whole.missed("contiguous_views") != []
    assert sorted(map(str, again.records)) == sorted(map(str, whole.records))
    assert dict(again.graphs) == dict(whole.graphs)
    assert versions.completed(half, None) is half

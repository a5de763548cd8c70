"""A pass without a site says what it looked for; a graph with nothing for k3 is called that."""

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.no_site import LOOKS_FOR, explained, nothing_for_us
from k3compile.passes.remarks import PassRecord, Remark

from k3compile import report


def record(name, *remarks):
    return PassRecord(name, 0.0, bool(remarks), remarks, 3, 3)


APPLIED = Remark("contiguous_views", "applied", "a", "aten.index_select", "a view")
MISSED = Remark("contiguous_views", "missed", "a", "aten.index_select", "not a range")
VIEW = Remark("canonicalize", "applied", "a", "aten.view", "view")
LOWERED = Remark("lower", "note", "a", "k3.situ", "computed by its meaning")


def test_every_pass_of_the_pipeline_says_what_it_looks_for():
    names = {one.name for one in (*pipeline.DYNAMO_PASSES, *pipeline.ATEN_PASSES)} | {"lower"}
    assert names <= set(LOOKS_FOR)


def test_a_record_without_a_remark_gets_one_and_others_stay():
    full = record("contiguous_views", MISSED)
    silent, kept, unknown = explained([record("latent_tail"), full, record("of_tomorrow")])
    (said,) = silent.remarks
    assert (said.kind, said.reason[:22]) == ("note", "no top-k finalize (exp")
    assert kept is full
    assert unknown.remarks[0].reason == "no site for this pass in this graph"


@pytest.mark.parametrize(
    ("records", "nothing"),
    [
        ([], True),
        ([record("canonicalize", VIEW), record("contiguous_views", MISSED)], True),
        ([record("contiguous_views", MISSED, APPLIED)], False),
        ([record("lower", LOWERED)], False),
    ],
)
def test_nothing_for_us_is_no_change_but_of_idle_views_and_no_op(records, nothing):
    assert nothing_for_us(records) is nothing
    assert nothing_for_us(explained(records)) is nothing


def compile_and_report(fn, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend="k3", options={"inner": "aot_eager"})(*args)
    return report.latest()


def test_a_report_says_why_a_pass_did_nothing():
    made = compile_and_report(lambda x: x.relu() + 1, torch.ones(3))
    assert "nothing here for k3, so it is what aot_eager alone makes of it" in made.text()
    for name in ("contiguous_views", "latent_tail", "state_export"):
        if name in {r.pass_name for r in made.remarks}:
            assert f"    note: no {LOOKS_FOR[name]} in this graph" in made.text()
    assert made.choices == {}
    assert report.Report.from_json(made.to_json()) == made


def test_a_report_of_a_graph_with_work_does_not_say_so():
    made = compile_and_report(lambda x: torch.ops.k3.situ(x, x, 4.0, 4.0), torch.ones(3, 8))
    assert "nothing here" not in made.text()

"""Remarks survive a trip through JSON, and read as sentences."""

import json

import pytest
from k3compile.passes.remarks import PassRecord, Proof, Remark

REMARK = Remark(
    pass_name="contiguous_views",
    kind="missed",
    node="index_select",
    op="aten.index_select",
    reason="unproven: end <= size",
    detail="u0 <= u1 is not known",
    source="model.py:7",
    proofs=(Proof("0 <= start", "construction", "0 <= 0"),),
    fix_it="add torch._check(nd <= x.shape[0])",
    expected={"launches": -1, "bytes": "-8*u0"},
)


def test_a_record_survives_json():
    record = PassRecord("contiguous_views", 0.25, True, (REMARK, REMARK), 10, 8)
    assert PassRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert Remark.from_json(json.loads(json.dumps(REMARK.to_json()))) == REMARK


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError):
        Remark.from_json({**REMARK.to_json(), "colour": "red"})


def test_a_remark_reads_as_a_sentence():
    assert str(REMARK) == (
        "contiguous_views: missed aten.index_select index_select at model.py:7: unproven: end <= size "
        "(fix: add torch._check(nd <= x.shape[0]))"
    )

"""Snapshots and remarks call a symbol the same, whatever the compile before called it."""

import sympy
from k3compile.passes.remarks import PassRecord, Proof, Remark
from k3compile.passes.symbol_names import SymbolNames, by_number, meant, renamed

TOLD = Remark(
    "views", "applied", "index_select", "aten.index_select", "rows [0, u12)", "writes u12 rows",
    proofs=(Proof("end <= size", "torch._check", "u12 <= s77"),), fix_it="torch._check(u12 <= s77)",
    expected={"launches": 1, "bytes": "8*u12"},
)  # fmt: skip


def test_symbols_are_numbered_by_kind_in_the_order_in_which_they_are_met():
    names = SymbolNames()
    assert [names.name(old) for old in ("s77", "u12", "s3", "s77")] == ["s0", "u0", "s1", "s0"]


def test_a_remark_is_told_in_the_names_of_the_snapshot():
    names = SymbolNames()
    names.name("s77")
    told = names.remark(TOLD)
    assert told.proofs[0].expression == "u0 <= s0"
    assert (told.reason, told.detail, told.fix_it) == (
        "rows [0, u0)",
        "writes u0 rows",
        "torch._check(u0 <= s0)",
    )
    assert told.expected == {"launches": 1, "bytes": "8*u0"}


def test_a_symbol_that_no_snapshot_has_met_is_not_taken_for_another():
    names = SymbolNames()
    names.name("u12")
    assert names.text("u12 <= u0") == "u0 <= u1"


def test_words_that_are_no_symbols_stay():
    assert SymbolNames().text("torch.float32 of arg3_1, f32, mm_2") == "torch.float32 of arg3_1, f32, mm_2"


def test_sizes_are_told_by_what_they_measure():
    told = meant(TOLD, {"u12": "step.spans[0]", "s77": "p.0"})
    assert told.proofs[0].expression == "step.spans[0] <= p.0"


def test_records_keep_everything_else():
    record = PassRecord("views", 1.5, True, (TOLD,), 9, 8)
    (found,) = renamed(SymbolNames(), [record])
    assert (found.name, found.seconds, found.remarks[0].node) == ("views", 1.5, "index_select")
    assert "u0" in found.remarks[0].reason


def test_symbols_are_sorted_by_number():
    assert sorted(sympy.symbols("u10 u9 s3"), key=by_number) == list(sympy.symbols("s3 u9 u10"))

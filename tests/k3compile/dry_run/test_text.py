"""What is printed: columns that add up, units that fit, what is wrong in so many words."""

from k3compile.dry_run.checks import Check
from k3compile.dry_run.run import DryRun, Found
from k3compile.dry_run.text import cell, table, text, unit_of
from k3compile.dry_run.totals import COSTS, COUNTED, PASSES, Totals, added

ZERO = dict.fromkeys((*COUNTED, *COSTS), 0)


def part(name, layers, before, after, missed=()):
    left = {one: list(missed) for one in PASSES}
    digests = {"captured": f"{name}-1", "aten": f"{name}-2", "final": f"{name}-3"}
    applied = dict.fromkeys(PASSES, 8)
    return Totals(
        name, layers, bool(layers), "key", digests, applied, left, ZERO | before, ZERO | after, (0, 0)
    )


def found(*checks, strangers=(), **asked):
    parts = (
        part("kda", 2, {"rows": 16, "bytes_read": 3 * 10**9, "all_reduce": 4, "collectives": 4}, {"tails": 2,
             "collectives": 6, "bytes_read": 10**9}, ["why"]),
        part("outside", 0, {"embeddings": 1}, {"embeddings": 1}),
    )  # fmt: skip
    return Found(DryRun(8, **asked), "kimi_k3", 2, parts, added(parts), checks, strangers, 1.5, 2**30)


def test_a_line_a_part_and_their_sum():
    lines = list(table(found()))
    assert lines[0].split() == [
        "layers", "row", "moves", "finalizes", "launches", "allocations", "GB", "moved", "collectives", "kB",
        "sent", "exports",
    ]  # fmt: skip
    assert lines[1].split()[:5] == ["kda", "2", "16", "->", "0"]
    assert "3.00 -> 1.00" in lines[1]
    assert lines[2].split()[:3] == ["outside", "-", "0"]
    assert lines[3].startswith("the step")
    assert "4 -> 6" in lines[3]
    assert len({len(line) for line in lines}) == 1


def test_what_tails_carry_is_told_apart_from_what_stands_in_the_graph():
    said = text(found())
    assert "collectives before: 4 all_reduce\n" in said
    assert "collectives after: 6 inside of 2 latent tails\n" in said
    assert "other gathers and scatters: 1 of the embedding, 0 more" in said


def test_missed_sites_are_counted_a_layer_and_told_once():
    said = text(found())
    assert "contiguous_views: 16 applied, 2 missed\n  missed: why\n" in said


def test_wrong_numbers_and_strange_ranks_are_told():
    said = text(found(Check("rows", 0, 8), Check("tails", 2, 2), strangers=("rank 3: other",), ranks=(0, 3)))
    assert "WRONG rows: 8, expected 0\nok    tails: 2\nWRONG rank 3: other\n" in said
    assert "ok    ranks 0, 3 run the same graphs" in text(found(ranks=(0, 3)))


def test_evidence_can_be_left_out():
    assert "graph of kda: kda-1 -> kda-2 -> kda-3\n" in text(found())
    assert "1.5 s, 1.00 GiB at most" in text(found())
    assert "kda-1" not in text(found(), evidence=False)


def test_context_groups_are_told_where_there_are_any():
    assert "rank 0 of 8, context groups of 4\n" in text(found(dcp=4))
    assert "context" not in text(found()).splitlines()[0]


def test_a_unit_is_chosen_by_the_sum_of_a_column():
    sizes = [unit_of({"bytes_read": n}, ("bytes_read",)) for n in (5, 10**3, 10**6, 10**9, 10**13)]
    assert sizes == ["kB", "kB", "MB", "GB", "GB"]
    assert unit_of({"rows": 5}, ("rows",)) == ""
    assert cell({"x_bytes": 2500}, {"x_bytes": 0}, ("x_bytes",), "kB") == "2.50 -> 0"
    assert cell({"rows": 1234}, {"rows": 1234}, ("rows",), "") == "1,234"

"""Random programs at three depths: with our passes they compute, write and share what eager does.

Every run checks a fixed range of programs and a fresh one (here a few; test_alias_fuzz_fixed and _fresh check
many); a failure prints the smallest program that fails and the command that runs it again.
"""

import alias_fuzz
import pytest
from alias_fuzz import DEPTHS, FRESH, FULL, RESULTS, Mismatch, check, complaint, count_of, run, shrunk
from alias_writer import Program, written
from k3compile.passes.aliasing import Aliases
from lanes import slow, thinned

pytestmark = pytest.mark.usefixtures("rev_into")


FEW = [("functional", 0), ("aot_eager", FRESH), ("functional", FRESH), ("aot_eager", 0)]


@pytest.mark.parametrize(
    ("depth", "first"),
    [*FEW[:2], *(slow(one, several=True) for one in FEW[2:])],
    ids=["functional-fixed", "aot_eager-fresh", "functional-fresh", "aot_eager-fixed"],
)
def test_a_few_programs_do_what_eager_does(depth, first):
    print(f"python tests/helpers/alias_fuzz.py {depth} {first} {count_of(depth, 'fast')}")
    totals = run(depth, first, count_of(depth, "fast"))
    if depth == "functional" and first == 0:  # so few new ones may happen not to
        assert min(totals["applied"], totals["missed"]) > 5, "they reach our passes"


GATHER = "v0 = a.index_select(0, torch.arange(0, n0))"
CORPUS = {  # the programs that broke naive rewrites, and the one that Inductor itself gets wrong
    "returned": Program((GATHER,), ("v0",)),
    "a view of it returned": Program((GATHER, "v1 = v0.view(-1)"), ("v1",)),
    "written after the gather, returned": Program((GATHER, "a.mul_(2)"), ("v0 + 1", "v0")),
    "written after the gather": Program((GATHER, "a.mul_(2)", "v2 = v0 + 1"), ("v2",)),
    "op reads what it writes": Program((GATHER, "torch.ops.k3test.rev_into(v0, a)"), ("a * 2",)),
    "op reads a view of what it writes": Program(
        (GATHER, "v1 = v0.view(-1, 3)", "torch.ops.k3test.rev_into(v1, a)"), ("a * 2",)
    ),
    "out of bounds is not known": Program(
        ("v0 = a.index_select(0, torch.arange(0, spans[0].item()))",), ("v0 + 1",)
    ),
    "a step": Program(("v0 = a.index_select(0, torch.arange(0, n0, 2))",), ("v0 + 1",)),
    "an index from outside": Program(("v0 = a.index_select(0, pick)",), ("v0 + 1",)),
    "scattered, then zeroed": Program(("v0 = torch.slice_scatter(a, b[1:3], 0, 1, 3)", "a.zero_()"), ("v0",)),
    "put, then flipped": Program(("a.index_copy_(0, torch.arange(8), a * 2)", "a.add_(a.flip(0))"), ("a",)),
    "all of it copied, then its source written": Program(("a[0:, :] = b[0:, :]", "b.add_(1)"), ("b",)),
}


@pytest.mark.parametrize("name", thinned(CORPUS, 4))
def test_the_programs_that_broke_naive_rewrites_are_right(name):
    for variant in (0, 1, 2, 3 * RESULTS, 3 * RESULTS + 1, 3 * RESULTS + 2):
        check(CORPUS[name], "functional", variant)
    check(CORPUS[name], "aot_eager", 0)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", CORPUS)
def test_and_they_are_right_under_inductor(name):
    check(CORPUS[name], "inductor", 0)


RULES = {  # what the legality rule says -> a program that is wrong without it, and its variant
    "the view would reach an output of the graph": (
        Program(("v0 = a.index_select(0, torch.arange(2, 5))", "a.mul_(0.5)"), ("v0",)),
        6,
    ),
    "the base is written before the view is last read": (
        Program(("v0 = a.index_select(0, torch.arange(2, 5))", "a.mul_(0.5)", "v2 = v0 * 3"), ("v2",)),
        6,
    ),
    "a consumer that takes the view writes the same storage": (
        Program(
            ("v0 = a.index_select(0, torch.arange(0, 8))", "torch.ops.k3test.rev_into(v0, a)"), ("a + 1",)
        ),
        2,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_fuzzer_sees_when_a_rule_of_legality_is_gone(rule, monkeypatch):
    one, variant = RULES[rule]
    check(one, "functional", variant)
    real = Aliases.view_objection
    lenient = {rule: None}
    monkeypatch.setattr(Aliases, "view_objection", lambda *args: lenient.get(found := real(*args), found))
    with pytest.raises(Mismatch):
        check(one, "functional", variant)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_random_programs_alone_find_that_a_rule_is_gone(rule, monkeypatch):
    """Well within a slow lane's count, which is 2,000; without shrinking, which takes longer than finding."""
    real = Aliases.view_objection
    lenient = {rule: None}
    monkeypatch.setattr(Aliases, "view_objection", lambda *args: lenient.get(found := real(*args), found))
    monkeypatch.setattr(alias_fuzz, "complaint", lambda one, depth, variant, error: str(error))
    with pytest.raises(AssertionError):
        run("functional", 10**6, 600)


def test_a_mismatch_is_made_small_and_printed_as_python(monkeypatch):
    monkeypatch.setattr(Aliases, "view_objection", lambda *args: None)
    one = Program(
        (
            "v0 = b.clone()",
            "v1 = a.index_select(0, torch.arange(2, 5))",
            "v2 = v0 * 2",
            "a.mul_(0.5)",
        ),
        ("v2", "v1 * 3"),
    )
    small = shrunk(one, "functional", 6, Mismatch)
    assert small.lines == (one.lines[1], one.lines[3])
    assert small.results == ("v1 * 3",)
    text = complaint(one, "functional", 6, Mismatch("result 1"))
    assert "python tests/helpers/alias_fuzz.py functional 0" in text
    with pytest.raises(Mismatch):
        exec(text[text.index("import sys") :], {})


def test_programs_reach_every_kind_of_statement():
    text = "".join(written(seed)[0].text for seed in range(60))
    writes = [
        "index_copy_",
        "scatter_",
        "slice_scatter",
        "index_add_",
        "index_put",
        "] = ",
        "rev_into",
        "short_conv",
    ]
    for part in [*writes, "narrow(0, k, 3)", "t().narrow(1, k", "gather", "pools[", "view(-1, 3)"]:
        assert part in text, part


def test_full_counts_are_those_promised(monkeypatch):
    monkeypatch.delenv("K3_ACCEPT", raising=False)
    assert [count_of(depth, "slow") for depth in DEPTHS] == [2000, 50, 4]
    monkeypatch.setenv("K3_ACCEPT", "1")
    assert {depth: count_of(depth, "slow") for depth in DEPTHS} == FULL
    assert list(FULL.values()) == [20_000, 500, 40]

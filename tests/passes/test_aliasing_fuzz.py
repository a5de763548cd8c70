"""Random programs of views, writes, gathers and scatters: with the passes they do what eager does."""

import re

import pytest
from alias_programs import arguments, program, source
from compiled import check

CALLS = [arguments(2, 5), arguments(0, 0), arguments(8, 8), arguments(3, 3), arguments(0, 8), arguments(1, 6)]


def verdict(seed: int, decompose: bool) -> tuple[int, int]:
    """How many sites were rewritten and how many stayed; fails where a result or an argument differs."""
    text = source(seed)
    try:
        compiled = check(program(text), *CALLS, decompose=decompose)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n{text}") from error
    unruled = [reason for reason in compiled.missed() if not re.search(r"\(R[1-8]\)$", reason)]
    assert not unruled, f"seed {seed}: a refusal names no rule: {unruled}"
    return len(compiled.applied()), len(compiled.missed())


@pytest.mark.parametrize("first", [0, 7])
def test_a_few_programs_do_what_eager_does(first):
    sites = [verdict(seed, decompose=seed % 5 == 4) for seed in range(first, first + 7)]
    assert sum(applied for applied, _ in sites) > 2, "the programs must exercise the rewrite"
    assert sum(missed for _, missed in sites) > 2, "and its refusals"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 25))
def test_many_programs_do_what_eager_does(first):
    for seed in range(first, first + 25):
        verdict(seed, decompose=seed % 2 == 1)

"""Random programs at their full counts, the half that is new in every run."""

import pytest
from alias_fuzz import FRESH, run_part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rev_into")]


@pytest.mark.parametrize("part", range(8))
def test_new_programs_do_what_eager_does_as_functional_graphs(part):
    run_part("functional", 2 * 10**6 + FRESH, part, 8)


@pytest.mark.parametrize("part", range(2))
def test_new_programs_do_what_eager_does_when_compiled(part):
    run_part("aot_eager", 2 * 10**6 + FRESH, part, 2)


@pytest.mark.inductor
@pytest.mark.timeout(1200)
def test_new_programs_do_what_eager_does_under_inductor():
    run_part("inductor", 2 * 10**6 + FRESH, 0, 1)

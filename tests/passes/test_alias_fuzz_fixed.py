"""Random programs at full count, the half that stays the same; another worker takes the fresh half."""

import pytest
from alias_fuzz import run_part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rev_into")]


@pytest.mark.parametrize("part", range(8))
def test_the_same_programs_do_what_eager_does_as_functional_graphs(part):
    run_part("functional", 10**6, part, 8)


@pytest.mark.parametrize("part", range(2))
def test_the_same_programs_do_what_eager_does_when_compiled(part):
    run_part("aot_eager", 1000, part, 2)


@pytest.mark.inductor
@pytest.mark.timeout(1200)
def test_the_same_programs_do_what_eager_does_under_inductor():
    run_part("inductor", 500, 0, 1)

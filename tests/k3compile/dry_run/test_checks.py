"""The numbers a step must come to follow from the configuration alone."""

import pytest
from k3compile.runtime.config import K3Config
from small_models import SMALL_LINEAR

from k3compile.dry_run.checks import checks
from k3compile.dry_run.totals import COUNTED, PASSES, Totals
from k3compile.dry_run.trace import LOGITS

RELEASED = K3Config.from_file("tests/data/kimi-k3-config.json")
ZERO = dict.fromkeys(COUNTED, 0)
WANTED = {
    "gathers and scatters of token rows before the passes": 552,
    "gathers and scatters of token rows after": 0,
    "states and windows exported inside the pass, before": 0,
    "states and windows exported inside the pass, after": 138,
    "finalize kernels before the passes": 92,
    "finalize kernels after": 0,
    "latent tails after": 92,
    "all-reduces before the passes": 279,
    "all-gathers of logits": 1,
    "sites that contiguous_views missed": 0,
    "sites that latent_tail missed": 0,
    "sites that state_export missed": 0,
}


def totals(name, before, after, missed=(), layers=1):
    left = {one: list(missed) for one in PASSES}
    sides = (ZERO | before, ZERO | after)
    return Totals(name, layers, bool(layers), "graph", {}, dict.fromkeys(PASSES, 0), left, *sides, (0, 0))


def step(gathers=1, **changed):
    """The parts of a step of the released model as they should be, but for what is ``changed``."""
    before = {"rows": 552, "finalizes": 92, "all_reduce": 279} | changed.pop("before", {})
    after = {"exports": 138, "tails": 92} | changed.pop("after", {})
    logits = {"all_gather_into_tensor": gathers}
    return [totals("all", before, after, **changed), totals(LOGITS, logits, logits, layers=0)]


def test_the_released_model_on_eight_ranks():
    found = checks(RELEASED, 8, 1, step())
    assert {one.what: one.expected for one in found} == WANTED
    assert all(one.ok for one in found)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"before": {"rows": 551}}, "gathers and scatters of token rows before the passes"),
        ({"after": {"rows": 8}}, "gathers and scatters of token rows after"),
        ({"after": {"exports": 0}}, "states and windows exported inside the pass, after"),
        ({"before": {"all_reduce": 280}}, "all-reduces before the passes"),
        ({"after": {"finalizes": 1}}, "finalize kernels after"),
        ({"gathers": 2}, "all-gathers of logits"),
    ],
)
def test_each_number_is_held(changed, wrong):
    assert [one.what for one in checks(RELEASED, 8, 1, step(**changed)) if not one.ok] == [wrong]


def test_a_missed_site_counts_once_a_layer():
    found = {c.what: c.found for c in checks(RELEASED, 8, 1, step(missed=["why"], layers=61))}
    assert [found[f"sites that {name} missed"] for name in PASSES] == [61, 61, 61]


def test_one_rank_sums_no_embedding_and_gathers_no_logits():
    found = {c.what: c.expected for c in checks(RELEASED, 1, 1, step())}
    assert (found["all-reduces before the passes"], found["all-gathers of logits"]) == (278, 0)


def test_context_groups_add_two_collectives_a_layer_of_latents():
    found = {c.what: c.expected for c in checks(RELEASED, 8, 8, step())}
    assert found["all-gathers of queries in context groups"] == 24
    assert found["exchanges of results in context groups"] == 24


def test_without_a_latent_the_finalizes_stay():
    found = {c.what: c.expected for c in checks(SMALL_LINEAR, 1, 1, step())}
    assert found["finalize kernels after"] == found["sites that latent_tail missed"] == 4
    assert found["sites that contiguous_views missed"] == 4
    assert found["latent tails after"] == 0

"""Greedy identity: whatever the features, a request gets the tokens that the plain model gives it alone."""

import os
import random

import pytest
from features_server import Abort, Lab, Preempt, Server, same
from features_traffic import STRANGER
from lanes import slow

from k3compile.features import FEATURES, expand, subsets

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
ALL = list(subsets())
NAMES = {s: "+".join(n for n in FEATURES if n in s) or "nothing" for s in ALL}
CAPABLE = frozenset({"prefix_cache", "speculate", "offload"})
POINTS = {"default": CAPABLE | expand("default"), "baseline": CAPABLE}


@pytest.fixture(scope="module")
def lab():
    return Lab()


def served(lab, features):
    seen = Server(lab, features).run()
    same(lab, seen)
    assert seen.acted() == set(features), "a feature did nothing, or one was at work unasked"
    assert seen.cached[STRANGER] == 0, "a tenant was given another's prefix"
    return seen


@pytest.mark.parametrize(
    "features",
    [
        *map(slow, (frozenset(), CAPABLE - {"offload"}, POINTS["baseline"])),
        CAPABLE | {"adaptive_budget", "state_replay"},
    ],
    ids=lambda s: "+".join(n for n in FEATURES if n in s) or "nothing",
)
def test_sets_without_a_pass_give_the_tokens_of_the_plain_model_alone(lab, features):
    served(lab, features)


def test_everything_at_once_gives_the_tokens_of_the_plain_model_alone(lab):
    served(lab, POINTS["default"])


@pytest.mark.parametrize("step", [slow(2), 9, slow(16)])
def test_requests_that_were_thrown_out_go_on_as_if_nothing_had_been(lab, step):
    thrown_out(lab, POINTS["baseline"], step)


@pytest.mark.slow
@pytest.mark.parametrize("features", ALL, ids=NAMES.get)
def test_every_legal_set_of_features_gives_the_tokens_of_the_plain_model_alone(lab, features):
    served(lab, features)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_everybody_is_thrown_out_after_any_step(lab, point):
    for step in steps_of(lab, point):
        thrown_out(lab, POINTS[point], step)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_request_is_aborted_after_any_step(lab, point):
    for step in steps_of(lab, point):
        aborted(lab, POINTS[point], step)


@pytest.mark.slow
def test_random_sets_are_disturbed_after_random_steps(lab):
    rng = random.Random(4)
    for _ in range(200 if FULL else 16):
        rng.choice([thrown_out, aborted])(lab, rng.choice(ALL), rng.randrange(25))


def thrown_out(lab, features, step):
    hook = Preempt(step)
    same(lab, Server(lab, features).run(hook))


def aborted(lab, features, step):
    hook = Abort(step)
    same(lab, Server(lab, features).run(hook), hook.hit)


def steps_of(lab, point):
    """All steps of an undisturbed run, or every sixth."""
    return range(0, Server(lab, POINTS[point]).run().steps, 1 if FULL else 6)

"""Small models on fake ranks: the counts hold, a missing pass is seen, every rank runs the same graphs."""

import os

import pytest
from dry_runs import ran

RANKS = "all" if os.environ.get("K3_ACCEPT") else "some"


@pytest.fixture(scope="module")
def tiny():
    return ran("tiny")["tiny"]


@pytest.fixture(scope="module")
def thin():
    """Several dry runs of one process."""
    return ran("linear", "no_views", "thin_dcp")


def step(one, measure):
    return tuple(one["found"]["step"][moment].get(measure, 0) for moment in ("before", "after"))


def wrong(one):
    return {c["what"]: (c["expected"], c["found"]) for c in one["found"]["checks"] if not c["ok"]}


def test_the_tiny_model_on_eight_ranks_makes_27_sums_and_one_gather(tiny):
    assert tiny["found"]["ok"]
    assert step(tiny, "all_reduce") == (27, 11)  # of 8 layers with experts two each are in their tails
    assert step(tiny, "all_gather_into_tensor") == (1, 1)
    assert step(tiny, "rows") == (48, 0)
    assert step(tiny, "finalizes") == (8, 0)
    assert step(tiny, "tails") == (0, 8)
    assert step(tiny, "exports") == (0, 12)


def test_a_tail_of_few_rows_carries_three_collectives(tiny):
    before, after = step(tiny, "collectives")
    assert before == 28
    assert after == 11 + 1 + 8 * 3
    assert "24 inside of 8 latent tails" in tiny["text"]


@pytest.mark.slow
def test_kimi_linear_has_no_latent_and_keeps_its_finalizes(thin):
    linear = thin["linear"]
    assert linear["found"]["ok"], linear["text"]
    assert step(linear, "rows") == (24, 0)
    assert step(linear, "finalizes") == (3, 3)
    assert "missed: no norm follows the weighted sum" in linear["text"]


@pytest.mark.slow
def test_a_pass_that_does_not_run_is_seen(thin):
    one = thin["no_views"]
    assert not one["found"]["ok"]
    assert wrong(one) == {"gathers and scatters of token rows after": (0, 24)}
    assert "WRONG gathers and scatters of token rows after: 24, expected 0" in one["text"]


@pytest.mark.slow
def test_context_groups_gather_and_exchange_once_a_layer_of_latents(thin):
    one = thin["thin_dcp"]
    assert one["found"]["ok"], one["text"]
    assert step(one, "all_gather_into_tensor") == (2, 2)  # one MLA layer, and the logits
    assert step(one, "all_to_all_single") == (1, 1)
    assert "ranks 0, 7 run the same graphs" in one["text"]


def each_number_names_its_graph(one):
    for part in one["found"]["parts"]:
        assert part["graph"].startswith(part["digests"]["captured"]) or not part["compiled"]
        assert part["digests"]["final"] in one["text"]


def test_each_number_names_its_graph(tiny):
    each_number_names_its_graph(tiny)


@pytest.mark.slow
def test_each_number_names_its_graph_in_every_run(thin):
    for one in thin.values():
        each_number_names_its_graph(one)


@pytest.mark.slow
def test_any_missing_pass_is_seen_and_ranks_are_alike():
    tiny, tiny_dcp = f"tiny_{RANKS}", f"tiny_dcp_{RANKS}"
    runs = ran("no_tail", "no_export", tiny, tiny_dcp)
    assert set(wrong(runs["no_tail"])) == {
        "finalize kernels after",
        "latent tails after",
        "sites that contiguous_views missed",  # it will not touch what data chooses
    }
    assert set(wrong(runs["no_export"])) == {"states and windows exported inside the pass, after"}
    assert runs[tiny]["found"]["ok"], runs[tiny]["text"]
    assert runs[tiny_dcp]["found"]["ok"], runs[tiny_dcp]["text"]
    assert step(runs[tiny_dcp], "all_to_all_single") == (3, 3)

import pytest

from k3compile.features import CAPABILITIES, FEATURES, OPTIMISATIONS, expand, resolve, subsets


def test_all_means_every_optimisation_and_no_capability():
    assert expand("all") == frozenset(OPTIMISATIONS)
    assert not expand("all") & set(CAPABILITIES)


@pytest.mark.parametrize("point", ["baseline", "plain"])
def test_the_reference_points_without_optimisations_keep_the_workloads_capabilities(point):
    assert expand((point, "speculate")) == {"speculate"}


def test_a_feature_whose_requirement_is_off_is_inert_and_says_what_it_needs():
    setting = resolve("all")["state_replay"]
    assert (setting.state, setting.reason) == ("inert", "needs speculate")
    assert resolve(("all", "speculate"))["state_replay"].on


def test_context_parallel_needs_more_than_one_rank():
    assert resolve("context_parallel")["context_parallel"].state == "inert"
    assert resolve("context_parallel", tensor_parallel=8)["context_parallel"].on


def test_an_unasked_feature_says_what_the_older_engine_did():
    assert "index_select" in resolve("baseline")["contiguous_views"].reason


def test_default_leaves_out_what_a_bench_showed_slower(monkeypatch):
    monkeypatch.setitem(__import__("k3compile.features").features.SLOWER, "cpu", ("latent_tail",))
    assert "latent_tail" not in expand("default", "cpu")
    assert "latent_tail" in expand("default", "cuda")


def test_an_unknown_name_is_refused_with_its_nearest():
    with pytest.raises(ValueError, match=r"'contiguos_views' \(did you mean 'contiguous_views'\?\)"):
        expand(("all", "contiguos_views"))


def test_requirements_stand_before_what_needs_them():
    order = list(FEATURES)
    for feature in FEATURES.values():
        needed = [r for r in feature.requires if r in FEATURES]
        assert all(order.index(r) < order.index(feature.name) for r in needed)


def test_what_a_pass_needs_of_a_runtime_is_the_callers_to_have_where_no_runtime_of_ours_calls():
    assert resolve("all", serving=False)["state_export"].on
    assert resolve("all", serving=True)["state_export"].reason == "needs prefix_cache"
    assert resolve(("all", "prefix_cache"), serving=True)["state_export"].on
    assert resolve("all", serving=False)["state_replay"].state == "inert", (
        "the runtime's own features are not"
    )
    assert resolve("baseline", serving=False)["state_export"].state == "off"


def test_every_legal_subset_is_listed_once_and_none_with_an_inert_feature():
    found = list(subsets())
    assert len(found) == len(set(found)) == 4 * 5 * 5, "2 free; 5 ways with prefix_cache, with speculate"
    assert not any("offload" in s and "prefix_cache" not in s for s in found)
    assert not any("context_parallel" in s for s in found)
    assert frozenset() in found
    assert frozenset(FEATURES) - {"context_parallel"} in found
    assert len(list(subsets(tensor_parallel=2))) == 2 * len(found)

"""One function settles who does what: engine, passes, drafts, and what is said of it."""

import pytest
from k3compile.runtime.engine_config import EngineConfig

from k3compile.features import OPTIMISATIONS, resolve, subsets
from k3compile.options import CompileOptions
from k3compile.serving import SET_BY_FEATURES, plan

CAPABLE = {
    "prefix_cache": {"prefix_cache": True},
    "speculate": {"num_drafts": 3},
    "offload": {"offload_host_bytes": 1 << 20},
}


def engine_of(chosen) -> EngineConfig:
    fields = {key: value for name in chosen if name in CAPABLE for key, value in CAPABLE[name].items()}
    return EngineConfig(**fields)


@pytest.mark.parametrize("chosen", list(subsets()), ids=lambda s: "+".join(sorted(s)) or "nothing")
def test_every_legal_subset_comes_out_as_it_was_asked_for(chosen):
    features = tuple(n for n in OPTIMISATIONS if n in chosen) or "baseline"
    made = plan(engine_of(chosen), CompileOptions(features=features))
    assert {name for name, setting in made.settings.items() if setting.on} == chosen
    assert resolve(made.options.features) == made.settings, "the passes are told the same"
    assert {name for name in SET_BY_FEATURES if getattr(made.engine, name)} == chosen & set(SET_BY_FEATURES)
    assert made.warnings == ()


def test_what_the_default_cannot_use_is_inert_and_printed():
    made = plan(EngineConfig())
    first, drafts = made.lines()
    assert first.startswith("features on: contiguous_views, latent_tail; inert: state_export (needs ")
    assert "state_replay (needs speculate)" in first
    assert drafts == "drafts: none"
    assert made.warnings == (), "nobody asked for them by name"
    assert made.options == CompileOptions(), "nothing to tell the passes: the same graphs as before"


def test_what_was_named_and_cannot_act_is_said():
    made = plan(EngineConfig(), CompileOptions(features=("state_replay", "latent_tail")), compiled=False)
    assert made.warnings == (
        "state_replay is asked for and does nothing: needs speculate",
        "latent_tail is asked for and does nothing: the model is not compiled",
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_size": 128}, "block_size is given and does nothing: prefix_cache is off"),
        ({"prefix_match_unit": 64}, "prefix_match_unit is given and does nothing: prefix_cache is off"),
        ({"retention_interval": 0}, "retention_interval is given and does nothing: prefix_cache is off"),
        ({"num_checkpoints": 4}, "num_checkpoints is given and does nothing: prefix_cache is off"),
        ({"verification": "standard"}, "verification is given and does nothing: num_drafts is 0"),
        ({"draft_sampling": "greedy"}, "draft_sampling is given and does nothing: num_drafts is 0"),
        (
            {"draft_sampling": "greedy", "num_drafts": 2},
            "draft_sampling is given and does nothing: n-grams are not drawn",
        ),
    ],
)
def test_a_setting_of_what_is_off_is_said_to_do_nothing(fields, said, tmp_path):
    assert plan(EngineConfig(**fields)).warnings == (said,)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    everything = {"prefix_cache": True, "num_drafts": 2, **fields}
    assert plan(EngineConfig(**everything), checkpoint=tmp_path).warnings == ()


def test_a_model_is_no_draft(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
    with pytest.raises(ValueError, match=r"whose model_type is 'kimi_k3' and not 'k3_dspark': give the fold"):
        plan(EngineConfig(num_drafts=2), draft=tmp_path)


def test_who_drafts_and_who_judges_is_said():
    made = plan(EngineConfig(num_drafts=2, adaptive_verification=True, verification="standard"))
    assert made.lines()[1].endswith("verified by the standard rule, as many as pay")
    assert made.warnings == ()


@pytest.mark.parametrize(
    ("fields", "features", "said"),
    [
        ({}, ("all", "prefix_cache"), "features names prefix_cache, but prefix_cache is off"),
        ({}, "speculate", "features names speculate, but num_drafts is 0"),
        ({"prefix_cache": True}, "offload", "features names offload, but there is neither"),
        (
            {"adaptive_verification": True},
            "default",
            "adaptive_verification chooses among drafts, but",
        ),
    ],
)
def test_a_contradiction_is_one_line(fields, features, said):
    with pytest.raises(ValueError, match=said) as error:
        plan(EngineConfig(**fields), CompileOptions(features=features))
    assert "\n" not in str(error.value)


def test_contradictions_come_together(tmp_path):
    with pytest.raises(ValueError, match=r"names speculate.*; draft is .*, but num_drafts is 0"):
        plan(EngineConfig(), CompileOptions(features="speculate"), draft=tmp_path)


def test_the_draft_is_the_one_given_or_the_checkpoints_or_n_grams(tmp_path):
    checkpoint, other = tmp_path / "checkpoint", tmp_path / "other"
    for folder in (checkpoint / "draft", other):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    drafting = EngineConfig(num_drafts=5)
    assert plan(drafting, checkpoint=checkpoint).draft == checkpoint / "draft"
    assert plan(drafting, checkpoint=checkpoint, draft=other).draft == other
    assert plan(EngineConfig(), checkpoint=checkpoint).draft is None
    told = plan(drafting, checkpoint=tmp_path)
    assert told.draft is None
    assert told.lines()[1] == (
        "drafts: up to 5 a request from n-grams of the request's own tokens, as there is no draft "
        "checkpoint; verified by the block rule"
    )
    assert "DSpark draft in" in plan(drafting, checkpoint=checkpoint).lines()[1]
    with pytest.raises(ValueError, match=r"which has no config\.json: give the folder of a DSpark draft"):
        plan(drafting, draft=tmp_path)


def test_latents_that_are_dealt_out_are_a_capability_of_the_launch():
    made = plan(EngineConfig(), ranks=8, context_ranks=2)
    assert made.settings["context_parallel"].on
    assert made.options.features == ("default", "context_parallel")
    assert made.lines()[-1] == "8 ranks share every layer, 2 the latents of a token"
    assert (made.ranks, made.context_ranks, made.warnings) == (8, 2, ())
    assert plan(EngineConfig(), CompileOptions(features=("context_parallel",)), ranks=4, context_ranks=4)
    alone = plan(EngineConfig(), ranks=8)
    assert alone.settings["context_parallel"].state == "off"
    assert alone.options.features == "default", "on so many ranks nothing else is switched"


@pytest.mark.parametrize(
    ("ranks", "context_ranks", "fields", "features", "said"),
    [
        (8, 3, {}, "default", "dcp is 3, and must divide tp, which is 8: give 1, 2, 4, 8"),
        (1, 2, {}, "default", "dcp is 2, and must divide tp, which is 1: give 1"),
        (4, 0, {}, "default", "dcp is 0, and must divide tp"),
        (
            8,
            1,
            {},
            "context_parallel",
            "features names context_parallel, but the latents are not dealt out: ",
        ),
        (
            2,
            1,
            {"prefix_cache": True, "offload_host_bytes": 1 << 20},
            "default",
            "offload with 2 ranks is not",
        ),
        (
            2,
            1,
            {"prefix_cache": True, "offload_dir": "x"},
            "default",
            "leave out offload_host_bytes and offl",
        ),
    ],
)
def test_what_ranks_cannot_do_is_said_with_what_to_do(ranks, context_ranks, fields, features, said):
    with pytest.raises(ValueError, match=said):
        plan(
            EngineConfig(**fields),
            CompileOptions(features=features),
            ranks=ranks,
            context_ranks=context_ranks,
        )

import dataclasses
from pathlib import Path

import pytest

from k3compile.options import CompileOptions, parse, read_switches


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown k3 compile option 'iner' \(did you mean 'inner'\?\)"):
        parse({"iner": "eager"})


def test_every_bad_value_is_listed_at_once():
    with pytest.raises(ValueError) as error:
        parse(
            {
                "inner": "aot_egaer",
                "features": "al",
                "lower": 3,
                "verify": "on",
                "on_error": "warn",
                "require": {"contiguous_views": 0},
                "disable": ["contiguous_vews"],
                "range_source": "guess",
                "inductor": {"max_autotun": True},
            }
        )
    message = str(error.value)
    for name in ("inner", "features", "lower", "verify", "on_error", "disable", "range_source", "inductor"):
        assert f"\n  {name}" in message, name
    assert "did you mean 'aot_eager'?" in message
    assert "did you mean 'max_autotune'?" in message


def test_a_required_count_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        CompileOptions(require={"contiguous_views": 0})


def test_the_users_dict_is_not_changed():
    given = {"inner": "eager", "disable": ["contiguous_views"]}
    parse(given)
    assert given == {"inner": "eager", "disable": ["contiguous_views"]}


def test_a_mode_becomes_inductor_options():
    assert parse(None, "max-autotune").inductor["max_autotune"] is True
    with pytest.raises(ValueError, match=r"unknown mode 'fastest'.*max-autotune"):
        parse(None, "fastest")


def test_any_registered_dynamo_backend_may_be_inside_but_not_k3_itself():
    assert CompileOptions(inner="aot_eager_decomp_partition").inner == "aot_eager_decomp_partition"
    with pytest.raises(ValueError, match="inner is 'k3'"):
        CompileOptions(inner="k3")


def test_a_provider_must_exist():
    assert CompileOptions(lower={"rms_norm": "meaning", "l2_norm": "open"}).lower["l2_norm"] == "open"
    with pytest.raises(ValueError, match=r"rms_norm has no provider 'trton'.*it has meaning, open"):
        CompileOptions(lower={"rms_norm": "trton"})
    with pytest.raises(ValueError, match=r"lower names no op: 'rms_nrm' \(did you mean 'rms_norm'\?\)"):
        CompileOptions(lower={"rms_nrm": "meaning"})


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompileOptions().inner = "eager"


def test_what_names_the_cache_knows_what_changes_code_and_no_more():
    base = CompileOptions().canonical()
    assert CompileOptions(report="somewhere.json").canonical() == base
    assert (
        CompileOptions(features="all").canonical() == CompileOptions(features=("default", "all")).canonical()
    )
    for changed in ({"features": "plain"}, {"inner": "eager"}, {"disable": ("contiguous_views",)}):
        assert CompileOptions(**changed).canonical() != base
    assert CompileOptions(features="plain").canonical() != CompileOptions(features="baseline").canonical()


def test_switches_come_from_the_environment():
    found = read_switches(
        {"K3_DUMP": "/tmp/x", "K3_DISABLE": "contiguous_views, latent_tail", "K3_FUEL": "17"}
    )
    assert (found.dump, found.fuel) == (Path("/tmp/x"), 17)
    assert found.disable == ("contiguous_views", "latent_tail")
    assert read_switches({}) == type(found)()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [("K3_FUEL", "many", "number of rewrites"), ("K3_DISABLE", "latent_tal", "did you mean 'latent_tail'")],
)
def test_a_bad_switch_is_refused_by_name(variable, value, says):
    with pytest.raises(ValueError, match=variable) as error:
        read_switches({variable: value})
    assert says in str(error.value)


def test_verification_is_one_level_or_one_by_pass():
    assert CompileOptions(verify="differential").verify == "differential"
    assert (
        CompileOptions(verify={"contiguous_views": "differential", "lower": "static"}).verify["lower"]
        == "static"
    )
    for wrong, says in [
        ("diferential", r"verify is 'diferential' \(did you mean 'differential'\?\)"),
        ({"contiguous_vews": "static"}, r"'contiguous_vews' \(did you mean 'contiguous_views'\?\)"),
        ({"lower": "statc"}, r"lower is 'statc' \(did you mean 'static'\?\)"),
        ({"lower": 3}, "lower is 3"),
        (3, "verify is 3"),
    ]:
        with pytest.raises(ValueError, match=says):
            CompileOptions(verify=wrong)

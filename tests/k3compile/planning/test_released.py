"""The released configurations by name are the released files."""

from pathlib import Path

import pytest
from k3compile.runtime.config import ConfigError, K3Config
from k3compile.runtime.speculate.dspark_config import DSparkConfig

from k3compile.planning.released import DRAFT, read_draft, read_model

DATA = Path(__file__).parents[2] / "data"


def test_kimi_k3_by_name_is_the_released_config():
    assert read_model("kimi-k3") == K3Config.from_file(DATA / "kimi-k3-config.json")


def test_the_released_draft_by_name_is_the_released_config():
    target = read_model("kimi-k3")
    assert read_draft(DRAFT, target) == DSparkConfig.from_file(DATA / "kimi-k3-dspark-config.json", target)


def test_kimi_linear_has_the_published_number_of_parameters():
    config = read_model("kimi-linear")
    assert (config.family, config.num_hidden_layers, config.num_experts) == ("kimi_linear", 27, 256)
    assert len(config.kda_layers) == 20


def test_a_path_is_read_and_what_is_no_path_is_refused():
    assert read_model(str(DATA / "kimi-k3-config.json")) == read_model("kimi-k3")
    with pytest.raises(ValueError, match=r"no model 'kimi-k2' \(did you mean 'kimi-k3'\?\)"):
        read_model("kimi-k2")
    with pytest.raises(ValueError, match="no draft 'relesed'"):
        read_draft("relesed", read_model("kimi-k3"))


def test_the_draft_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="target_num_hidden_layers"):
        read_draft(DRAFT, read_model("kimi-linear"))

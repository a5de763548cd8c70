"""Settings of a watch are checked once."""

import pytest
from k3compile.runtime.parallel.watch_config import WatchConfig

from k3compile.cli.flags import help_of


def test_the_defaults_end_a_job_within_ten_seconds():
    config = WatchConfig()
    assert config.step_deadline_s < 10
    assert config.silence_s < config.step_deadline_s < config.load_deadline_s


def test_what_is_out_of_range_is_listed_in_one_error():
    with pytest.raises(ValueError, match=r"step_deadline_s .* got 0\.5; silence_s .* got nan"):
        WatchConfig(step_deadline_s=0.5, silence_s=float("nan"))


def test_every_setting_has_its_help():
    assert set(help_of(WatchConfig)) == {"step_deadline_s", "load_deadline_s", "silence_s"}

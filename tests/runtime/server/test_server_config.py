"""Settings of the server: every fault in one message."""

import pytest
from k3compile.runtime.server.server_config import ServerConfig


def test_the_default_listens_on_loopback_only():
    assert ServerConfig().is_loopback
    assert ServerConfig(host="::1").is_loopback
    assert not ServerConfig(host="0.0.0.0").is_loopback
    assert not ServerConfig(host="::").is_loopback


def test_all_faults_are_told_at_once():
    with pytest.raises(ValueError) as error:
        ServerConfig(
            port=70000,
            model_name="",
            api_key="",
            effort="medium",
            max_choices=0,
            drain_s=-1,
            stall_s=float("nan"),
        )
    for part in (
        "port must be",
        "model_name is empty",
        "api_key is empty",
        "effort must be",
        "max_choices must",
    ):
        assert part in str(error.value)
    assert "drain_s must be 0 or more" in str(error.value)
    assert "stall_s must be 0 or more" in str(error.value)

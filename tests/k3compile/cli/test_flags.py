"""Flags from dataclasses: one place for name, type, default and help."""

import inspect
from dataclasses import dataclass, fields

import pytest
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.server.server_config import ServerConfig

from k3compile.cli.flags import flags_of, help_of, pick, with_flags


@dataclass(frozen=True)
class Settings:
    """Settings. Raises nothing.

    width: how wide (in cm. or so); the rest is air. tall, or deep: how far. name:
    what ``it`` is called. switch: on or off.
    """

    width: int = 3
    tall: float | None = None
    deep: float | None = None
    name: str = "x"
    switch: bool = True
    table: dict | None = None


def test_every_plain_field_becomes_a_flag_with_its_default():
    flags = {flag.name: flag for flag in flags_of(Settings, ["name"])}
    assert list(flags) == ["width", "tall", "deep", "switch"]
    assert flags["width"].default == 3
    assert flags["tall"].default is None


def test_help_is_the_fields_sentence():
    assert help_of(Settings) == {
        "width": "how wide (in cm. or so); the rest is air",
        "tall": "how far",
        "deep": "how far",
        "name": "what it is called",
        "switch": "on or off",
    }


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig])
def test_nearly_every_setting_of_ours_explains_itself(kind):
    missing = {field.name for field in fields(kind)} - set(help_of(kind))
    assert missing <= {"draft_limit"}


def test_a_function_gets_its_own_parameters_and_the_flags():
    def verb(path: str, **flags):
        """Do it."""
        return path, pick(Settings, flags)

    made = with_flags(verb, (Settings, ["name"]))
    assert list(inspect.signature(made).parameters) == ["path", "width", "tall", "deep", "switch"]
    assert made.__doc__ == "Do it."
    assert made("p", width=5, switch=False) == ("p", Settings(width=5, switch=False))

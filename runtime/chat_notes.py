"""The system notes of a K3 prompt: text the model was trained on, so every byte counts.

tool-declare, thinking-effort   before the messages
tool-choice, response-format    behind them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

EFFORTS = ("low", "high", "max")

_TOOLS = """\
# Tools
Here are the available tools, described in JSONSchema.

"""
_MORE_TOOLS = """\
## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

"""
_EFFORT = """\
`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
supported values include `low`, `medium`, `high`, and `max`.
Now the system is invoked with `thinking_effort={}`."""
_CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} in the next message."
_DUTIES = {"required": "MUST call tools", "none": "MUST NOT call any tools"}
_FORMAT = """\
The system is invoked with `response_format={}`.
Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."""
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def tool_declare(tools: Sequence[Mapping], *, dynamic: bool = False) -> str:
    """The list of tools; ``dynamic`` for tools that a later system message adds."""
    return (_MORE_TOOLS if dynamic else _TOOLS) + _fenced(tools)


def thinking_effort(effort: str) -> str:
    """How much to think. Raises ``ValueError`` for an effort the model was not trained on."""
    check_effort(effort)
    return _EFFORT.format(effort)


def check_effort(effort: str) -> None:
    """Refuse "medium" and the rest: the note lists "medium", the model's own code refuses it."""
    if effort not in EFFORTS:
        raise ValueError(f"reasoning_effort is {effort!r}; K3 was trained on {', '.join(EFFORTS)}")


def tool_choice(choice: str | None) -> str | None:
    """The note for "required" or "none"; "auto" and None have none."""
    duty = _DUTIES.get(choice) if isinstance(choice, str) else None
    return _CHOICE.format(choice, duty) if duty else None


def response_format(wanted: Mapping | None) -> str | None:
    """The note for {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}."""
    kind = wanted.get("type") if wanted else None
    if kind == "json_object":
        return _FORMAT.format(kind)
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        schema = holder.get("schema", holder) if isinstance(holder, Mapping) else holder
        return _FORMAT.format(kind) + _SCHEMA + _fenced(schema)
    return None


def _fenced(value: object) -> str:
    """Compact JSON in a fence, keys sorted at every depth."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"```json\n{text}\n```"

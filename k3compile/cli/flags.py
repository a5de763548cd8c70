"""Flags out of dataclasses: a setting has its name, type, default and help in one place, its class.

    max_num_seqs: int = 16      ->  --max-num-seqs INTEGER  [default: 16]
    adaptive_budget: bool       ->  --adaptive-budget / --no-adaptive-budget

The help is the sentence "name: ..." of the class's docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

T = TypeVar("T")
SIMPLE = (int, float, str, bool)


def with_flags(function: Callable, *settings: tuple[type, Collection[str]]) -> Callable:
    """``function(..., **flags)`` with a flag for each field; settings: (dataclass, fields to leave out).

    Fields whose type is no number, text or switch have no flag.
    """
    own = inspect.signature(function)
    fixed = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(function, include_extras=True)
    fixed = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in fixed]
    extra = [flag for kind, skipped in settings for flag in flags_of(kind, skipped)]

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = own.replace(parameters=[*fixed, *extra], return_annotation=inspect.Signature.empty)
    call.__annotations__ = {p.name: p.annotation for p in (*fixed, *extra)}
    return call


def flags_of(kind: type, skipped: Collection[str] = ()) -> list[inspect.Parameter]:
    """One keyword parameter for each plain field of the dataclass."""
    helps = help_of(kind)
    hints = get_type_hints(kind)
    panel = kind.__name__
    out = []
    for field in dataclasses.fields(kind):
        if field.name in skipped or not is_plain(hints[field.name]):
            continue
        option = typer.Option(help=helps.get(field.name, ""), rich_help_panel=panel)
        out.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], option],
            )
        )
    return out


def is_plain(hint: Any) -> bool:
    """A number, a text or a switch, or one of them and None."""
    members = (
        [h for h in get_args(hint) if h is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    )
    return len(members) == 1 and members[0] in SIMPLE


def help_of(kind: type) -> dict[str, str]:
    """Field name -> its sentence in the class's docstring."""
    text = " ".join((kind.__doc__ or "").split())
    names = "|".join(field.name for field in dataclasses.fields(kind))
    starts = list(re.finditer(rf"(?:(?<=\. )|(?<=\) )|(?<=^))({names})(?:, (?:or )?({names}))*:? ", text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    out: dict[str, str] = {}
    for match, end in zip(starts, ends):
        sentence = text[match.end() : end].strip().rstrip(".").replace("``", "")
        for name in re.findall(names, match[0]):
            out.setdefault(name, sentence)
    return out


def pick(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance from those values that are its fields."""
    return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})

"""Where in the user's code a node comes from, and how the user spelled what it computes.

A hint such as ``add torch._check(nd <= x.shape[0])`` is only useful in the user's own names, which the
graph has lost. The line is known, so the call is found in the file's syntax tree and its arguments are
printed from there.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import fx

TORCH = os.path.dirname(torch.__file__) + os.sep
FRAME = re.compile(r'File "([^"]+)", line (\d+).*(?:\n    \S.*)?(?:\n    ( *)\^)?')


class Location(NamedTuple):
    """A line of the user's code; column is where the call starts in it, if the trace points at it."""

    file: str
    line: int
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def location(node: fx.Node) -> Location | None:
    """The innermost frame of a node's stack trace that is not torch's own code."""
    frames = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    users = [frame for frame in frames if not frame[1].startswith(TORCH)] or frames
    if not users:
        return None
    file, line, spaces = users[-1].groups()
    text = linecache.getline(file, int(line))
    indent = len(text) - len(text.lstrip())
    return Location(file, int(line), None if spaces is None else indent + len(spaces))


def spelled(node: fx.Node, names: set[str]) -> ast.Call | None:
    """The call on the node's line to a function or method of ``names``; None if there is not exactly one."""
    where = location(node)
    if where is None:
        return None
    found = [c for c in calls(where.file) if called(c) in names and c.lineno <= where.line <= c.end_lineno]
    if len(found) > 1:
        found = [c for c in found if c.col_offset == where.column and c.lineno == where.line]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=64)
def calls(file: str) -> tuple[ast.Call, ...]:
    """Every call in a file; none for what is not readable Python."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str | None:
    """The last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def positional(call: ast.Call, place: int, receiver: bool) -> str | None:
    """The source of an argument; with ``receiver``, of a method call's object counted as argument 0."""
    args = list(call.args)
    if receiver and isinstance(call.func, ast.Attribute) and not is_module(call.func.value):
        args.insert(0, call.func.value)
    if place >= len(args) or any(isinstance(a, ast.Starred) for a in args[: place + 1]):
        return None
    return ast.unparse(args[place])


def is_module(object_: ast.expr) -> bool:
    """Whether ``torch`` or ``torch.ops.x`` stands left of the dot, and not a tensor."""
    return ast.unparse(object_).split(".")[0] == "torch"

"""The entry point behind ``torch.compile(model, backend="k3")``.

torch loads this file when the name ``k3`` is first asked for, so it imports torch alone and everything else
on the first compile: a broken part of ours cannot break ``torch.compile`` for other backends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def k3(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. ``options`` are the fields of ``k3compile.CompileOptions``.

    Raises ValueError for an unknown option or a bad value (torch shows it as BackendCompilerFailed).
    """
    from .backend import compile_graph
    from .options import parse

    return compile_graph(gm, example_inputs, parse(options, mode))


def reset() -> None:
    """Forget what this process compiled; ``torch._dynamo.reset()`` calls it."""
    report = sys.modules.get(f"{__package__}.report")
    if report is not None:
        report.forget()


k3.reset = reset

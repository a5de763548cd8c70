"""Drop views that show all of a tensor as it is, so that later passes see what is really read.

    v = view(x, [T, H, K])       x is [T, H, K] already      v is x
    s = slice(x, 0, 0, T)        x has T rows                s is x

A view that the graph returns stays: its caller would otherwise get one tensor where it expects two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from k3compile.passes.graph import value
from k3compile.passes.rewrite import Group, Rewrite, Site
from k3compile.passes.static_check import alike

aten = torch.ops.aten


def shows_all(site: Site) -> bool:
    """Whether the view has the sizes and strides of what it views, so that it cannot start elsewhere."""
    return alike(site.value("x"), value(site.anchor), site.ctx.prover)


def returned(site: Site) -> str | None:
    """A view may be returned beside what it views."""
    is_output = any(user.op == "output" for user in site.anchor.users)
    return "the graph returns the view" if is_output else None


def no_op(name: str, pattern: Callable, first: Callable) -> Rewrite:
    return Rewrite(name, pattern, first, returned, shows_all)


CANONICALIZE = Group(
    "canonicalize",
    (
        no_op("alias", lambda x: aten.alias.default(x), lambda x: x),
        no_op("detach", lambda x: aten.detach.default(x), lambda x: x),
        no_op("view", lambda x, size: aten.view.default(x, size), lambda x, size: x),
        no_op("reshape", lambda x, size: aten.reshape.default(x, size), lambda x, size: x),
        no_op("expand", lambda x, size: aten.expand.default(x, size), lambda x, size: x),
        no_op("permute", lambda x, dims: aten.permute.default(x, dims), lambda x, dims: x),
        no_op(
            "slice",
            lambda x, dim, start, end: aten.slice.Tensor(x, dim, start, end),
            lambda x, dim, start, end: x,
        ),
    ),
)

"""Finds the KDA layers of a model by the functions their forward calls, and lets those be k3 ops.

    layer.__class__            KimiLinearDeltaAttention  ->  a subclass of it, this layer's alone
    subclass.forward           the same code, whose globals name our functions
    the library's module       as it was

A forward finds its functions in its module's globals, which all models share; so the code is given globals of
its own. Decorators around it are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn

from .. import kernels  # noqa: F401  registers the ops
from . import of_fla, of_transformers

KIMI_LINEAR = "transformers.models.kimi_linear."
MAKERS: dict[tuple[str, str], Callable] = {  # (start of the module's name, function) -> what makes ours
    (KIMI_LINEAR, "chunk_kimi_delta_attention"): of_transformers.kda_for,
    (KIMI_LINEAR, "recurrent_kimi_delta_attention"): of_transformers.kda_for,
    (KIMI_LINEAR, "causal_conv1d_fn"): of_transformers.conv_for,
    (KIMI_LINEAR, "causal_conv1d_update"): of_transformers.conv_update_for,
    ("fla.ops.kda", "chunk_kda"): of_fla.kda_for,
    ("fla.ops.kda", "fused_recurrent_kda"): of_fla.kda_for,
}
ORIGINAL = "_k3_original_class"


def adopt(model: nn.Module) -> nn.Module:
    """Let the KDA layers of ``model`` compute with k3 ops, so that ``backend="k3"`` can work on them.

    Known are the layers of transformers' Kimi-Linear and those that call fla's KDA functions. Returns the
    model, changed in place; weights, caches and source files stay as they are, other models too, and
    :func:`unadopt` undoes it. Adopting twice is adopting once. Raises ValueError for a model without a
    layer that is known, and for a layer whose forward was replaced on the instance.
    """
    known = False
    for name, layer in model.named_modules():
        if hasattr(type(layer), ORIGINAL):
            known = True
        elif ours := replacements(type(layer)):
            if "forward" in layer.__dict__:
                raise ValueError(
                    f"{name} has a forward of its own, set by a hook or by hand: adopt the model before that"
                )
            layer.__class__ = adopted_class(type(layer), tuple(ours))
            known = True
    if not known:
        functions = ", ".join(function for _, function in MAKERS)
        raise ValueError(
            f"{type(model).__name__} has no KDA layer to adopt: no forward calls one of {functions}. "
            'Any other model is compiled with backend="k3" as it is'
        )
    return model


def unadopt(model: nn.Module) -> nn.Module:
    """Give every adopted layer its own class back. Returns the model; one never adopted is left alone."""
    for layer in model.modules():
        if original := getattr(type(layer), ORIGINAL, None):
            layer.__class__ = original
    return model


def replacements(cls: type[nn.Module]) -> dict[str, Callable]:
    """Global names in a class's forward -> how to make what stands for them; empty where none is known."""
    inner = innermost(cls.forward)
    if not isinstance(inner, FunctionType):
        return {}
    found = {}
    for name in inner.__code__.co_names:
        function = inner.__globals__.get(name)
        for (module, known), make in MAKERS.items():
            if getattr(function, "__name__", "") == known and function.__module__.startswith(module):
                found[name] = make
    return found


def innermost(function: Callable) -> Callable:
    """The function that decorators made with ``functools.wraps`` are around."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@functools.cache
def adopted_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass for layers of ``cls``, the same for all of them: a graph is compiled once a class."""
    theirs, makers = innermost(cls.forward).__globals__, replacements(cls)
    ours = {name: makers[name](theirs[name]) for name in names}
    body = {"forward": told_its_tokens(rebound(cls.forward, ours), names), ORIGINAL: cls}
    return type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def told_its_tokens(forward: Callable, names: tuple[str, ...]) -> Callable:
    """A forward that hands its token count on where a convolution gets earlier tokens in front of its own.

    transformers passes what it does not know through to its functions.
    """
    if "causal_conv1d_fn" not in names:
        return forward

    @functools.wraps(forward)
    def counted(self: nn.Module, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(
            self, hidden_states, *args, **{of_transformers.TOKENS: hidden_states.shape[1]}, **kwargs
        )

    return counted


def rebound(function: Callable, ours: Mapping[str, Callable]) -> Callable:
    """A copy of ``function``, decorators included, that finds ``ours`` under their names.

    Raises ValueError for a decorator that does not hold the function it is around.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        # Dynamo reads the globals of a function from the module that they name, where they name one.
        space = {name: x for name, x in function.__globals__.items() if name != "__name__"}
        return copied(function, space | ours, function.__closure__)
    new = rebound(inner, ours)
    cells = tuple(CellType(new) if held(cell) is inner else cell for cell in function.__closure__ or ())
    if not any(held(cell) is new for cell in cells):
        raise ValueError(f"{function.__qualname__} is wrapped in a way adopt does not know")
    made = copied(function, function.__globals__, cells)
    made.__wrapped__ = new
    return made


def held(cell: CellType) -> Any:
    """What a closure cell holds; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def copied(function: FunctionType, space: dict[str, Any], cells: tuple[CellType, ...] | None) -> FunctionType:
    """The same code with other globals and another closure."""
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__, made.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    made.__dict__.update(function.__dict__)
    return made

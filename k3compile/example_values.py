"""Values for the inputs of a graph: which real one fits a placeholder, and made-up ones where none does.

float     random, standard normal
integer   an index of the dimensions it is used to index, or else 0, which is a valid index, count and offset
size      the size that Dynamo saw; 2 where it is data-dependent
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .passes.graph import arguments, value

aten = torch.ops.aten
UNSEEN = 2  # a size nobody has seen yet
INDEXES = {  # op -> the argument that holds an index, and the one that it indexes
    aten.index_select.default: ("index", "self"),
    aten.index_copy.default: ("index", "self"),
    aten.index_add.default: ("index", "self"),
    aten.gather.default: ("index", "self"),
    aten.scatter.src: ("index", "self"),
    aten.scatter_add.default: ("index", "self"),
    aten.index.Tensor: ("indices", "self"),
    aten.index_put.default: ("indices", "self"),
    aten.embedding.default: ("indices", "weight"),
}


def size_of(n: int | torch.SymInt) -> int:
    """A number for a size: the one of the example inputs, where there is one."""
    if isinstance(n, int):
        return n
    hint = hint_of(n)
    return UNSEEN if hint is None else hint


def hint_of(n: torch.SymInt) -> int | None:
    """The number a size had in the example; None for one known only at run time, or a ragged tensor's, which
    has no number."""
    hint = None if n.node.is_nested_int() else n.node.hint
    return None if hint is None else int(hint)


def fitting(wanted: Any, given: Any) -> bool:
    """Whether an input can stand at a placeholder whose fake value is ``wanted``."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(given, torch.Tensor)
            and not isinstance(given, torch._subclasses.FakeTensor)
            and (wanted.dtype, wanted.dim(), wanted.device) == (given.dtype, given.dim(), given.device)
            and all(same_size(a, b) for a, b in zip(wanted.shape, given.shape))
        )
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if isinstance(wanted, (int, torch.SymInt)):
        return number and same_size(wanted, given)
    return wanted is None or (number and isinstance(wanted, (float, torch.SymFloat)))


def same_size(wanted: int | torch.SymInt, given: int) -> bool:
    """Whether a size may be ``given``: any may, where it is known only at run time."""
    if isinstance(wanted, torch.SymInt):
        wanted = hint_of(wanted)
    return wanted is None or wanted == given


def concrete(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a compile as values: Dynamo hands sizes over as symbols."""
    symbols = symbols_of(graph, inputs)
    return [symbols.get(str(i), size_of(i)) if isinstance(i, torch.SymInt) else i for i in inputs]


def symbols_of(graph: fx.Graph, inputs: Sequence[Any]) -> dict[str, int]:
    """The symbols in the sizes of a graph's inputs, with the numbers they stand for: those of the tensors
    first, since a size handed over as a symbol may not know its number."""
    found: dict[str, int] = {}
    pairs = list(zip(graph.find_nodes(op="placeholder"), inputs))
    for hole, given in pairs:
        if isinstance(given, torch.Tensor) and isinstance(value(hole), torch.Tensor):
            for size, number in zip(value(hole).shape, given.shape):
                if isinstance(size, torch.SymInt) and str(size).isalnum():
                    found.setdefault(str(size), size_of(number))
    for hole, given in pairs:
        if isinstance(given, (int, torch.SymInt)) and str(value(hole)).isalnum():
            found.setdefault(str(value(hole)), size_of(given))
    return {name: number for name, number in found.items() if not name.isdigit()}


def synthesised(node: fx.Node, seed: int) -> Any:
    """A made-up value for a placeholder, of the sizes, strides, dtype and device of its fake value."""
    wanted = value(node)
    if isinstance(wanted, (int, torch.SymInt)):
        return size_of(wanted)
    if not isinstance(wanted, torch.Tensor):
        return 1.0 if isinstance(wanted, (float, torch.SymFloat)) else wanted
    sizes, strides = [size_of(n) for n in wanted.shape], [size_of(n) for n in wanted.stride()]
    return random_tensor(sizes, strides, wanted.dtype, wanted.device, bound_of(node), seed)


def random_tensor(
    sizes: list[int], strides: list[int], dtype: torch.dtype, device: Any, bound: int, seed: int
) -> torch.Tensor:
    """Floats are standard normal, integers below ``bound``, no two elements in one place unless strides say
    so."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex else torch.float32
        made = torch.randn(sizes, generator=generator, dtype=wide).to(dtype)
    elif dtype == torch.bool:
        made = torch.randint(0, 2, sizes, generator=generator).bool()
    else:
        made = torch.randint(0, max(bound, 1), sizes, generator=generator).to(dtype)
    laid_out = torch.empty_strided(sizes, strides, dtype=dtype)
    if 0 in strides:  # an expanded tensor: fill what it has
        laid_out.untyped_storage().fill_(0)
    else:
        laid_out.copy_(made)
    return laid_out.to(device)


def bound_of(node: fx.Node) -> int:
    """One more than the largest integer that is valid wherever ``node`` is used as an index; 1 if nowhere."""
    bound, seen, todo = sys.maxsize, set(), [node]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        for user in one.users:
            if user.target in INDEXES:
                index, base = INDEXES[user.target]
                named = arguments(user)
                taken = named[index] if isinstance(named[index], (list, tuple)) else [named[index]]
                dims = [named["dim"]] if "dim" in named else [i for i, t in enumerate(taken) if t is one]
                if one in taken:
                    bound = min([bound, *(size_of(value(named[base]).shape[d]) for d in dims)])
            elif keeps_values(user):
                todo.append(user)
    return 1 if bound == sys.maxsize else bound


def keeps_values(user: fx.Node) -> bool:
    """Whether the elements of a node are those of its first argument."""
    if not isinstance(user.target, torch._ops.OpOverload):
        return False
    looks_through = any(r.alias_info for r in user.target._schema.returns)
    return looks_through or user.target in (aten.clone.default, aten._to_copy.default)

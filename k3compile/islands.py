"""Another Dynamo backend as the compiler of islands: found by name, called as Dynamo would, and not trusted.

    options={"inner": "tensorrt"}            any registered backend compiles the islands
    options={"inner": "islands:inductor"}    one of our own three names, for islands only

The backend gets a functional graph and fake inputs. What it returns is checked at every call: an island is
pure, so whatever is wrong with it, its own graph computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import fx

from . import torch_private
from .passes.islands import IslandRefused, Islands

PREFIX = "islands:"
OWN = ("inductor", "aot_eager", "eager")
REGISTERED_BY = {"tensorrt": "torch_tensorrt", "torch_tensorrt": "torch_tensorrt"}  # backend -> its module
log = logging.getLogger(__name__)


class IslandError(RuntimeError):
    """The compiler of an island failed, or what it made returned something else than the island."""


def compiler_of(inner: str) -> str | None:
    """The backend that compiles the islands for this ``inner`` option; None where there are no islands."""
    return None if inner in OWN else inner.removeprefix(PREFIX)


def absent(inner: str) -> str | None:
    """One line for a backend whose library is not installed, or None."""
    library = REGISTERED_BY.get(inner.removeprefix(PREFIX))
    if library is None or find_spec(library) is not None:
        return None
    return f"inner is {inner!r}, whose library {library} is not installed: pip install 'k3compile[tensorrt]'"


def islands(inner: str, on_error: Literal["raise", "fallback"]) -> Islands:
    """The pass that gives islands to the backend that ``inner`` names."""
    compiler = compiler_of(inner)

    def make(name: str, gm: fx.GraphModule, inputs: list[Any]) -> torch.nn.Module:
        try:
            with torch_private.fresh_tracing(inputs), torch.no_grad():
                compiled = backend(compiler)(torch_private.clone_dynamo_graph(gm), inputs)
        except (
            Exception
        ) as error:  # whatever another compiler raises: the rest of the program still has to run
            reason = f"{compiler} failed on it: {type(error).__name__}: {first_line(error)}"
            if on_error == "raise":
                raise IslandError(f"{name}: {reason}") from error
            log.warning("%s is not compiled by %s and stays ours: %s", name, compiler, reason)
            raise IslandRefused(reason) from error
        return Island(name, compiler, compiled, gm, on_error)

    return Islands(compiler, make)


def backend(name: str) -> Any:
    """The Dynamo backend, its library imported if that is what registers it."""
    if library := REGISTERED_BY.get(name):
        import_module(library)
    return torch_private.registered_backend(name)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


class Island(torch.nn.Module):
    """What the outer graph calls: the compiled island, its results checked, or the island's own graph."""

    def __init__(self, name: str, compiler: str, compiled: Any, graph: fx.GraphModule, on_error: str) -> None:
        super().__init__()
        self.name, self.compiler, self.on_error = name, compiler, on_error
        self.compiled = [
            compiled
        ]  # in a list: a module would be registered, and become part of the outer one
        self.graph = [graph]
        self.expected = [node.meta["val"] for node in graph.graph.output_node().args[0]]
        self.layouts = [layout(value) for value in self.expected]
        self.given_up = False

    def forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Raises IslandError for wrong results with on_error ``raise``."""
        if self.given_up:
            return self.graph[0](*args)
        try:
            results = self.compiled[0](*args)
            problem = self.problem(results)
        except Exception as error:  # as above; its own graph raises again what is the user's mistake
            problem, cause = f"{type(error).__name__}: {first_line(error)}", error
        else:
            cause = None
        if problem is None:
            return tuple(as_traced(r, order) for r, order in zip(results, self.layouts))
        if self.on_error == "raise":
            raise IslandError(f"{self.name}, compiled by {self.compiler}: {problem}") from cause
        log.warning("%s is not computed by %s any more: %s", self.name, self.compiler, problem)
        self.given_up = True
        return self.graph[0](*args)

    def problem(self, results: Any) -> str | None:
        """What is wrong with results, or None."""
        if not isinstance(results, (tuple, list)) or len(results) != len(self.expected):
            return f"it returned {type(results).__name__} and not a tuple of {len(self.expected)}"
        for place, (got, want) in enumerate(zip(results, self.expected)):
            if not isinstance(got, torch.Tensor):
                return f"result {place} is a {type(got).__name__} and not a tensor"
            kinds = [f"{t.dtype} on {t.device.type}" for t in (got, want)]
            if kinds[0] != kinds[1]:
                return f"result {place} is {kinds[0]}, not {kinds[1]}"
            known = [isinstance(n, int) for n in want.shape]
            if got.dim() != want.dim() or any(k and g != w for k, g, w in zip(known, got.shape, want.shape)):
                return f"result {place} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        return None


def layout(value: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost, as the island was traced."""
    hints = torch_private.size_hints(value.stride())
    return sorted(range(value.dim()), key=lambda d: -hints[d])


def as_traced(result: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """``result`` laid out in ``order``, since views further on were traced with that."""
    if result.permute(order).is_contiguous():
        return result
    return torch.empty_permuted(result.shape, order, dtype=result.dtype, device=result.device).copy_(result)

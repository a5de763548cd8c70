"""A folder that makes a failed compile fail again, to look at or to send to somebody.

    <K3_DUMP, or Inductor's cache folder/k3>/crash-<key>/
      repro.py     the graph Dynamo gave us, its inputs made up, and a call that compiles and runs it
      graph.json   the same graph as a snapshot, for tools       graph.txt   for people
      error.txt    what went wrong, the options, the versions

No value of the user's is written: weights and inputs become random numbers of the same sizes, strides and
dtypes; only names, sizes, constants and source lines of the program are in there.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from . import torch_private
from .example_values import bound_of, random_tensor, symbols_of
from .options import CompileOptions
from .passes.graph import value
from .passes.runner import PassError
from .passes.snapshot import snapshot, text

log = logging.getLogger(__name__)

HEADER = '''"""Fails as the compile it was written for did: {error}

Run it with `python repro.py`. Its values are random, none is the user's. k3compile, torch {torch}.
"""

import torch
from torch import device, inf, nan

from k3compile.reproduce import Input, rerun


'''


@dataclass(frozen=True)
class Input:
    """A tensor to be made up. sizes, strides: numbers, or expressions over the symbols. bound: one more than
    the largest integer that may be in it."""

    sizes: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    dtype: torch.dtype
    device: str = "cpu"
    bound: int = 1
    seed: int = 0

    def make(self, symbols: Mapping[str, int], count: int = 0) -> torch.Tensor:
        """The tensor for given values of the symbols. Integers that index nothing may be counts: all are
        ``count``."""
        sizes, strides = ([evaluate(n, symbols) for n in many] for many in (self.sizes, self.strides))
        made = random_tensor(sizes, strides, self.dtype, self.device, self.bound, self.seed)
        is_count = self.bound == 1 and self.dtype in (torch.int32, torch.int64)
        return made.fill_(count) if is_count else made


def write(
    folder: Path,
    key: str,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: CompileOptions,
    error: BaseException,
) -> Path | None:
    """Write ``folder/crash-<key>`` and return it; None, with a warning, where that is impossible.

    Of ``inputs`` only the sizes are read.
    """
    target = folder / f"crash-{key}"
    made = snapshot(gm, "dynamo")
    details = "".join(traceback.format_exception(error))
    lines = [details, f"options: {asdict(options)}", f"torch {torch.__version__}", platform.platform()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "graph.json").write_text(json.dumps(made, indent=1))
        (target / "graph.txt").write_text(text(made))
        (target / "error.txt").write_text(without_values("\n".join(lines)) + "\n")
        (target / "repro.py").write_text(source(gm, inputs, options, error))
    except (OSError, TypeError) as problem:
        log.warning("no reproducer of the failed compile could be written to %s: %s", target, problem)
        return None
    return target


def announce(error: BaseException, target: Path | None) -> None:
    """Add where the reproducer is to the message of ``error``."""
    if target is None:
        return
    line = f"reproducer: python {target / 'repro.py'}"
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{line}", *error.args[1:])
    else:
        error.add_note(line)
    log.warning("%s", line)


def source(gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, error: BaseException) -> str:
    """The program: a module with the graph as its forward, its inputs, and the call."""
    first = (
        (str(error).strip().splitlines() or [type(error).__name__])[0].replace("\\", "/").replace('"', "'")
    )
    body = gm.graph.python_code("self", verbose=False).src.strip()
    holes = gm.graph.find_nodes(op="placeholder")
    lines = "".join(f"    {described(value(node), bound_of(node), i)},\n" for i, node in enumerate(holes))
    kept = {k: v for k, v in asdict(options).items() if k != "report"}
    return (
        HEADER.format(error=without_values(first), torch=torch.__version__)
        + "class Repro(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + "".join(attribute_lines(gm))
        + "\n"
        + "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
        + f"\n\nSYMBOLS = {symbols_of(gm.graph, inputs)}\nINPUTS = [\n{lines}]\nOPTIONS = {kept!r}\n\n"
        + 'if __name__ == "__main__":\n    rerun(Repro(), INPUTS, SYMBOLS, OPTIONS)\n'
    )


def without_values(message: str) -> str:
    """A message of the differential verification quotes two numbers of the user's; they stay at home."""
    return re.sub(r"was \S+ and is \S+ at \[", "differs at [", message)


def attribute_lines(gm: fx.GraphModule) -> list[str]:
    """Constants and buffers that the graph reads, as random tensors; nested graphs have no source here."""
    lines = []
    for name in dict.fromkeys(str(n.target) for n in gm.graph.find_nodes(op="get_attr")):
        held = gm
        for part in name.split("."):
            held = getattr(held, part)
        if isinstance(held, torch.Tensor):
            lines.append(f"        self.{name} = {described(held, 1, 0)}.make({{}})\n")
        else:
            lines.append(f"        self.{name} = None  # a {type(held).__name__}, which has no source here\n")
    return lines


def described(given: Any, bound: int | torch.SymInt, seed: int) -> str:
    """One input as source: an :class:`Input`, or a size as the text of its symbol."""
    if isinstance(given, torch.Tensor):
        sizes, strides = (tuple(map(plain, many)) for many in (given.shape, given.stride()))
        low = bound if isinstance(bound, int) else 1
        return f'Input({sizes}, {strides}, {given.dtype}, "{given.device}", bound={low}, seed={seed})'
    return repr(plain(given))


def plain(given: Any) -> Any:
    return str(given) if isinstance(given, (torch.SymInt, torch.SymFloat)) else given


def evaluate(size: int | str, symbols: Mapping[str, Any]) -> Any:
    """A size from its text; the text was written by :func:`described` and holds symbols and arithmetic."""
    if isinstance(size, int):
        return size
    return eval(size, {"__builtins__": {}, "Max": torch.sym_max, "Min": torch.sym_min}, dict(symbols))


def rerun(
    module: torch.nn.Module, inputs: Sequence[Any], symbols: Mapping[str, int], options: Mapping[str, Any]
) -> Any:
    """Compile ``module`` as the backend would, and call it: raises what the compile raised."""
    result = attempt(module, inputs, symbols, options, count=0)
    try:  # a graph whose counts are all 0 computes little: a wrong pass may show only now
        attempt(module, inputs, symbols, options, count=1)
    except PassError:
        raise
    except RuntimeError as error:
        log.info("counts of 1 are not valid here: %s", error)
    return result


def attempt(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    symbols: Mapping[str, int],
    options: Mapping[str, Any],
    count: int,
) -> Any:
    """One compile and one call."""
    from .backend import compile_graph
    from .options import parse

    mode, sizes = torch_private.symbolic_sizes(symbols)
    real, seen, fakes = [], [], []
    for given in inputs:
        if isinstance(given, Input):
            tensor = given.make(symbols, count)
            shape, strides = ([evaluate(n, sizes) for n in many] for many in (given.sizes, given.strides))
            fakes.append(torch_private.fake_of(mode, tensor, shape, strides))
            seen.append(tensor)
        else:
            tensor = evaluate(given, symbols) if isinstance(given, str) else given
            fakes.append(evaluate(given, sizes) if isinstance(given, str) else given)
            seen.append(fakes[-1])
        real.append(tensor)
    with torch.no_grad(), torch_private.tracing_with(mode):
        compiled = compile_graph(captured(module, fakes, mode), seen, parse(options))
    with torch.no_grad():
        return compiled(*real)


def captured(module: torch.nn.Module, fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """``module`` as a graph with the values Dynamo would have put on its nodes."""
    gm = fx.symbolic_trace(module)
    for node in gm.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None
    Values(gm, mode).run(*fakes)
    return gm


class Values(fx.Interpreter):
    """Runs a graph on fake tensors and keeps each value on its node."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        with self.mode, self.mode.shape_env.ignore_fresh_unbacked_symbols(), torch.no_grad():
            result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Any:
        held = super().get_attr(target, args, kwargs)
        return self.mode.from_tensor(held, static_shapes=True) if isinstance(held, torch.Tensor) else held

"""Checks after a pass, without running anything, that the graph still promises what it promised.

A signature is taken before the pass: which inputs are written, which inputs and outputs share memory, and
what every node's value looks like. Afterwards it must agree, and every new node and every node that now
reads something new is computed again on fake tensors, so that a pass cannot just claim a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from k3compile.passes.aliasing import storage_of
from k3compile.passes.graph import AUTO_FUNCTIONALIZED, infer, schema_writes, value, values
from k3compile.passes.in_place import root_of
from k3compile.passes.prover import Prover
from k3compile.passes.remarks import Remark
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Signature:
    """What a graph promises its caller, and the look of every node."""

    results: tuple[Any, ...]
    written: frozenset[str]
    aliases: frozenset[frozenset[str]]
    looks: dict[str, Any]
    reads: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Signature:
        """The signature of ``graph`` as it is now."""
        calls = [node for node in graph.nodes if node.op != "output"]
        return cls(
            results=tuple(value(result) for result in results_of(graph)),
            written=frozenset(written_inputs(graph)),
            aliases=frozenset(shared_memory(graph)),
            looks={node.name: value(node) for node in calls},
            reads={node.name: tuple(n.name for n in node.all_input_nodes) for node in calls},
        )

    def touched(self, graph: fx.Graph) -> bool:
        """Whether nodes came, went, or read something else."""
        return self.reads != Signature.of(graph).reads


def written_inputs(graph: fx.Graph) -> Iterable[str]:
    """Placeholders whose memory some node writes in place."""
    inputs = {storage_of(node): node.name for node in graph.nodes if node.op == "placeholder"}
    inputs.pop(None, None)
    for node in graph.nodes:
        for changed in schema_writes(node):
            if (name := inputs.get(storage_of(changed))) is not None:
                yield name


def results_of(graph: fx.Graph) -> list[Any]:
    """What the graph returns, as a flat list of nodes and constants."""
    (results,) = graph.output_node().args
    return list(results) if isinstance(results, (list, tuple)) else [results]


def shared_memory(graph: fx.Graph) -> Iterable[frozenset[str]]:
    """Groups of two or more inputs and outputs that share memory; outputs by their position."""
    groups: dict[int | None, set[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            groups.setdefault(storage_of(node), set()).add(node.name)
    for place, result in enumerate(results_of(graph)):
        if isinstance(result, fx.Node):
            owner = root_of(result)  # a view of a node that a pass replaced still shows the old one's memory
            groups.setdefault(storage_of(owner), set()).add(f"output {place}")
    groups.pop(None, None)
    return (frozenset(group) for group in groups.values() if len(group) > 1)


def differences(before: Signature, graph: fx.Graph, mode: FakeTensorMode | None, prover: Prover) -> list[str]:
    """Promises that ``graph`` no longer keeps, as sentences; none when all is well."""
    after = Signature.of(graph)
    problems = []
    if not alike(before.results, after.results, prover):
        problems.append(f"the results were {before.results} and are {after.results}")
    written = after.written & before.looks.keys()  # an input that the pass added is the pass's to write
    if written != before.written:
        problems.append(f"written inputs were {sorted(before.written)} and are {sorted(written)}")
    if after.aliases != before.aliases:
        problems.append(f"shared memory was {names(before.aliases)} and is {names(after.aliases)}")
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.name in before.looks and not alike(before.looks[node.name], value(node), prover):
            problems.append(f"{node.name} was {before.looks[node.name]} and is {value(node)}")
        fresh = node.op == "call_function" and before.reads.get(node.name) != after.reads[node.name]
        if (
            fresh
            and not node.meta.get("unbacked_bindings")
            and not alike(recomputed(node, mode), value(node), prover)
        ):
            problems.append(f"{node.name} claims {value(node)} and computes {recomputed(node, mode)}")
    return problems


def recomputed(node: fx.Node, mode: FakeTensorMode | None) -> Any:
    """The value of a node from its arguments; a functionalised call gives its bases back as they look."""
    if node.target in AUTO_FUNCTIONALIZED:
        bases = values(node.kwargs.get("_all_bases", ()))
        return (*value(node)[: len(value(node)) - len(bases)], *bases)
    return infer(node, mode)


def alike(one: Any, other: Any, prover: Prover) -> bool:
    """Whether two values have the same sizes, strides, dtype and device, whatever their symbols are
    called."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b, prover) for a, b in zip(one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim()):
            return False
        pairs = [*zip(one.shape, other.shape), *zip(one.stride(), other.stride())]
        return all(prover.equal(a, b) for a, b in pairs)
    if isinstance(one, (int, torch.SymInt)) and isinstance(other, (int, torch.SymInt)):
        return isinstance(one, bool) or prover.equal(one, other)
    return type(one) is type(other)


def unfounded(remarks: Iterable[Remark], prover: Prover) -> list[str]:
    """Reported inequalities that do not hold when read back from their own text."""
    claims = [p.expression for r in remarks for p in r.proofs if " <= " in p.expression]
    return [f"the proof {claim} does not hold" for claim in dict.fromkeys(claims) if not prover.holds(claim)]


def names(groups: frozenset[frozenset[str]]) -> list[list[str]]:
    return sorted(sorted(group) for group in groups)

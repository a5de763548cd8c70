"""What Inductor made of a graph, counted in the Python it generated: the second column beside the estimate.

extern_kernels.mm(x, w, out=buf0)          a call: of a library, or of an op of its own
buf2 = empty_strided_cpu((8, 4), ...)      an allocation
cpp_fused_mul_relu_0(buf0, buf2)           a fused kernel
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUSED = ("cpp_fused_", "triton_")
ALLOCATES = "empty_strided_"
LIBRARIES = ("extern_kernels.", "torch.ops.", "aten.", "fallback_")
FREE = ("torch.ops.aten._assert", "torch.ops._c10d_functional.wait_tensor")


def counts(sources: Iterable[str]) -> dict[str, int]:
    """``fused`` kernels, library and op ``calls``, ``launches`` (both) and ``allocations`` of generated code.

    What an op allocates inside is not seen. Empty for no source, and for code of an unknown form.
    """
    names = [name for source in sources for name in called(source)]
    if not names:
        return {}
    fused = sum(name.startswith(FUSED) for name in names)
    calls = sum(name.startswith(LIBRARIES) and not name.startswith(FREE) for name in names)
    allocations = sum(name.startswith(ALLOCATES) for name in names)
    return {"launches": fused + calls, "fused": fused, "calls": calls, "allocations": allocations}


def called(source: str) -> Iterator[str]:
    """Dotted names of everything the generated ``call`` and its partitions call, in order."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name.startswith(("call", "partition_")):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield ast.unparse(node.func)

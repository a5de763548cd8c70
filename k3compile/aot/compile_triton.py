"""One kernel compiled for a GPU that is not here, and what stands in the result.

Launch --signature--> Triton --> PTX, cubin --cuobjdump--> registers, stack
                             --> amdgcn (text) ---------> registers, spills
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from k3compile.kernels.jit_triton import Launch

from .parts import Part, warps_resident

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
MATRIX = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "tcgen05_block_scale": r"tcgen05\.mma\S*block_scale",
    "mma_sync": r"mma\.sync",
    "mfma": r"v_mfma_f32_\w+bf16",
    "mfma_scale": r"v_mfma_scale",
    "vector_load": r"ld\.global[\w.:]*\.v[48]|(?:global|buffer)_load_dwordx4",
}


@dataclass(frozen=True)
class Figures:
    """registers of a thread; spill: bytes of stack (NVIDIA) or of registers (AMD) a thread; shared: bytes;
    resident: warps a core holds; found: how often the text has each instruction of MATRIX.
    """

    registers: int
    spill: int
    shared: int
    resident: int
    warps: int
    programs: int
    found: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def signature(launch: Launch, names: list[str], hip: bool) -> tuple[dict, dict, dict]:
    """(types, constants, attributes) the way Triton specialises a call: on None, on 1, on multiples of 16.

    Tensors are taken to start at a multiple of 16 bytes, as the objections of our kernels demand.
    """
    types, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(names, launch.args)):
        if isinstance(value, torch.Tensor):
            types[name] = POINTERS[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
            if hip and value.numel() * value.element_size() < 1 << 31:
                attributes[i,] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
        elif value is None or (type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i64" if value >= 1 << 31 else "i32"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    for name, value in launch.constants.items():
        types[name], constants[name] = "constexpr", value
    return types, constants, attributes


def compiled(launch: Launch, part: Part) -> Any:
    """Triton's result for one launch. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel.awake() if hasattr(launch.kernel, "awake") else launch.kernel
    types, constants, attributes = signature(launch, kernel.arg_names, part.backend == "hip")
    types = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget(part.backend, part.arch, part.warp), options=options)


def figures(launch: Launch, part: Part) -> Figures:
    """Compile one launch for ``part`` and read the result."""
    made = compiled(launch, part)
    text = made.asm["ptx" if part.backend == "cuda" else "amdgcn"]
    registers, spill = of_cubin(made.asm["cubin"]) if part.backend == "cuda" else of_amdgcn(text)
    shared, programs = made.metadata.shared, 1
    for n in launch.grid:
        programs *= n
    found = {name: len(re.findall(pattern, text)) for name, pattern in MATRIX.items()}
    return Figures(
        registers,
        spill,
        shared,
        warps_resident(part, registers, shared, launch.num_warps),
        launch.num_warps,
        programs,
        {name: count for name, count in found.items() if count},
    )


def of_cubin(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack), by the tool that comes with Triton: what spills goes to the stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    used = dict(re.findall(r"(REG|STACK):(\d+)", said.stdout + said.stderr))
    return int(used["REG"]), int(used["STACK"])


def of_amdgcn(text: str) -> tuple[int, int]:
    """(vector registers, bytes spilled)."""
    counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text))
    return int(counts["vgpr_count"]), 4 * int(counts["vgpr_spill_count"])

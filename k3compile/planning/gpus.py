"""What a GPU offers, for plans: figures of makers and of those who measured, each with where it is from.

All sizes are in units of 10^9, the cautious reading: some makers count in 2^30. Floating-point rates
are dense.
"""

from __future__ import annotations

from typing import NamedTuple

from ..features import nearest

GB, TB, PETA = 10**9, 10**12, 10**15


class Gpu(NamedTuple):
    """One GPU of a node."""

    name: str
    memory: int  # bytes that a process can see
    bandwidth: float  # bytes a second of its memory
    flops: float  # bfloat16 operations a second
    per_node: int  # GPUs that a fast link joins
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        # 288 GB: support matrix of NVIDIA's NIM for B300-SXM6. 7.7 TB/s and 2.25 PFLOP/s: HGX B300; the GB300
        # has 8 TB/s.
        Gpu("b300", 288 * GB, 7.7 * TB, 2.25 * PETA, 8, "NVIDIA HGX B300"),
        # 180 of 192 GB are for use: NIM's support matrix and MLPerf's "B200-SXM-180GB". The bus has 7680 bits
        # at 3996 MHz: measured in pytorch/ao #4002.
        Gpu("b200", 180 * GB, 7.67 * TB, 2.25 * PETA, 8, "NVIDIA HGX B200, 180 of 192 GB usable"),
        # 141 GB: MLPerf's "H200-SXM-141GB". 4.8 TB/s and 989 TFLOP/s: its data sheet.
        Gpu("h200", 141 * GB, 4.8 * TB, 0.989 * PETA, 8, "NVIDIA HGX H200"),
        # 288 GB: MLPerf's "MI355X 288GB HBM3e". 8 TB/s: its data sheet. 5 PFLOP/s in 8 bits (256 units of
        # 8192 operations at 2.4 GHz, ISSCC 2026), half of them in bfloat16.
        Gpu("mi355x", 288 * GB, 8.0 * TB, 2.5 * PETA, 8, "AMD Instinct MI355X platform"),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ValueError for a GPU that is not in the table."""
    if name.lower() not in GPUS:
        raise ValueError(f"no figures for gpu {name!r}{nearest(name, GPUS)}; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]

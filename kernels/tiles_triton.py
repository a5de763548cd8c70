"""The tiles kernels may run with on a part, and those they do: nothing is tried out when a process starts.

    SPACES   what is worth compiling, the best first: larger products, deeper pipelines, then smaller ones
    LATER    where the first is not what ships: with some version of Triton it spills, leaves too few warps on
             a core, or lacks the instruction (k3compile.aot.space has the figures, and a test compares)

An expert gets few rows, some or many: fewer than 8 on average, fewer than 96, or more. Weights stand upright
in a product, so BN counts their rows and BM those that meet them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .jit_triton import target

BLOCK_SCALED = ("sm_100", "sm_103", "gfx950")  # parts whose matrix instructions take scales of 32 columns
FAMILY = {"sm_90": "hopper", "sm_100": "blackwell", "sm_103": "blackwell", "gfx950": "mi350"}


class Tiles(NamedTuple):
    """How one kernel is cut: what is compiled in, warps of a program, and loads that are under way."""

    constants: dict[str, int]
    warps: int
    stages: int

    @property
    def label(self) -> str:
        """``BM16 BN64 BK128 w4 s3``: its name in a table."""
        return " ".join([*(f"{k}{v}" for k, v in self.constants.items()), f"w{self.warps} s{self.stages}"])


def product(rows: int, *choices: tuple[int, int, int, int]) -> tuple[Tiles, ...]:
    """Tiles of the expert products: (BN, BK, warps, stages) with so many rows of one expert."""
    return tuple(Tiles({"BM": rows, "BN": n, "BK": k}, w, s) for n, k, w, s in choices)


def spaces_of(rows: int, hopper: tuple, blackwell: tuple, mi350: tuple) -> dict[str, tuple[Tiles, ...]]:
    """By family; one without candidates does not run the kernel."""
    named = {"hopper": hopper, "blackwell": blackwell, "mi350": mi350}
    return {family: product(rows, *choices) for family, choices in named.items() if choices}


def each_family(*choices: Tiles) -> dict[str, tuple[Tiles, ...]]:
    """The same candidates everywhere."""
    return dict.fromkeys(("hopper", "blackwell", "mi350"), choices)


WIDE, EVEN, NARROW = (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)
AMD_WIDE, AMD_NARROW = (128, 128, 8, 2), (64, 128, 4, 2)
SPACES: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "gate_up/few": spaces_of(
        16, ((64, 128, 4, 4), (64, 64, 4, 4)), ((128, 128, 8, 4), (64, 128, 4, 4)), (AMD_NARROW,)
    ),
    "gate_up/some": spaces_of(64, (EVEN, (64, 64, 4, 4)), (WIDE, EVEN), (AMD_WIDE, AMD_NARROW)),
    "gate_up/many": spaces_of(128, (EVEN, NARROW), (WIDE, EVEN), (AMD_WIDE, AMD_NARROW, (128, 64, 8, 2))),
    "down/few": spaces_of(16, (WIDE, NARROW), (WIDE, NARROW), ((128, 128, 4, 2), AMD_NARROW)),
    "down/some": spaces_of(64, (WIDE, EVEN), (WIDE, EVEN), (AMD_WIDE, AMD_NARROW)),
    "down/many": spaces_of(128, (WIDE, EVEN), (WIDE, EVEN), (AMD_WIDE, AMD_NARROW)),
    "gate_up_mxfp8/few": spaces_of(16, (), ((128, 128, 4, 4), WIDE), ((64, 256, 4, 2), AMD_NARROW)),
    "gate_up_mxfp8/some": spaces_of(64, (), ((128, 128, 4, 3), WIDE), (AMD_WIDE, AMD_NARROW)),
    "gate_up_mxfp8/many": spaces_of(128, (), ((128, 128, 4, 3), WIDE), (AMD_WIDE, AMD_NARROW)),
    "down_mxfp8/few": spaces_of(16, (), ((128, 128, 4, 3), WIDE), ((128, 128, 4, 2), AMD_NARROW)),
    "down_mxfp8/some": spaces_of(64, (), (WIDE,), (AMD_WIDE, AMD_NARROW)),
    "down_mxfp8/many": spaces_of(128, (), (WIDE,), (AMD_WIDE, AMD_NARROW)),
    "mla_expand": each_family(Tiles({"BM": 128, "BN": 128, "BK": 64}, 8, 3)),
    "mla_rows": each_family(
        Tiles({"BQ": 128, "BN": 64}, 8, 2),
        Tiles({"BQ": 128, "BN": 32}, 8, 2),
        Tiles({"BQ": 128, "BN": 32}, 8, 1),
    ),
}  # fmt: skip
LATER = {
    ("gate_up/few", "sm_90"): 1,
    ("gate_up/few", "sm_100"): 1,
    ("gate_up/few", "sm_103"): 1,
    ("gate_up/many", "gfx950"): 2,
    ("gate_up_mxfp8/many", "sm_100"): 1,
    ("gate_up_mxfp8/many", "sm_103"): 1,
    ("mla_rows", "sm_90"): 1,
    ("mla_rows", "sm_100"): 2,  # 64 keys want more tensor memory than there is: compiled, that is a trap
    ("mla_rows", "sm_103"): 2,
    ("mla_rows", "gfx950"): 2,
}
ROWS = {"few": 16, "some": 32, "many": 64}
ANYWHERE = {
    "mla_expand": Tiles({"BM": 64, "BN": 64, "BK": 64}, 4, 2),
    "mla_rows": Tiles({"BQ": 64, "BN": 32}, 4, 1),
    **{f"gate_up/{case}": product(rows, (64, 64, 4, 2))[0] for case, rows in ROWS.items()},
    **{f"down/{case}": product(rows, (64, 64, 4, 2))[0] for case, rows in ROWS.items()},
    **{f"gate_up_mxfp8/{case}": product(rows, (64, 64, 4, 2))[0] for case, rows in ROWS.items()},
    **{f"down_mxfp8/{case}": product(rows, (64, 64, 4, 2))[0] for case, rows in ROWS.items()},
}
IN_FLOAT32 = product(16, (64, 32, 4, 2))[0]

_TRIED: ContextVar[dict[str, Tiles] | None] = ContextVar("k3_triton_tiles", default=None)


@contextmanager
def trying(chosen: dict[str, Tiles]) -> Iterator[None]:
    """Inside, the named kernels are cut as given, to see what comes of it."""
    token = _TRIED.set(chosen)
    try:
        yield
    finally:
        _TRIED.reset(token)


def tiles(name: str) -> Tiles:
    """What ships for the part a launch is for now: ``gate_up/few``. A part without a space gets ANYWHERE."""
    tried = _TRIED.get() or {}
    if name in tried:
        return tried[name]
    part = target()
    space = SPACES[name].get(FAMILY.get(part, ""))
    return space[LATER.get((name, part), 0)] if space else ANYWHERE[name]


def expert_tiles(form: str, choices: int, experts: int) -> tuple[Tiles, Tiles]:
    """For both products of experts, in a form of moe_triton.py; both go through the same blocks of rows."""
    if form == "float32":
        return IN_FLOAT32, IN_FLOAT32
    case = "few" if choices < 8 * experts else "some" if choices < 96 * experts else "many"
    kind = "_mxfp8" if form == "mxfp8" else ""
    return tiles(f"gate_up{kind}/{case}"), tiles(f"down{kind}/{case}")


def block_scaled() -> bool:
    """Whether the part a launch is for now has block-scaled matrix instructions."""
    return target() in BLOCK_SCALED

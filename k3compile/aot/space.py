"""The tiles kernels could run with, pruned without a GPU: all are compiled, and the first that holds ships.

    kernels/tiles_triton.py SPACES  --compile--> spaces/<version of Triton>.json
        spills, asks for too much shared memory, leaves too few warps on a core, lacks its instruction: out
        the first of the rest, in every committed version --> what tiles_triton ships (a test compares)

The order of candidates is a judgement about work and memory; nothing here was timed. Times from a GPU would
reorder a space, not widen it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..kernels.tiles_triton import FAMILY, SPACES, Tiles, trying
from .cells import Cell, every_cell
from .compile_triton import figures
from .parts import PARTS, Part

FOLDER = Path(__file__).parent / "spaces"
CALLS = {"few": "decode", "some": "chunk", "many": "prefill"}
FEW_WARPS, WARPS = 12, 8  # of a core at least: with few rows an expert only loads under way hide memory
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]  # space, target, label of the tiles -> figures


def call_of(name: str) -> tuple[Cell, str]:
    """The call that runs the kernel of a space, and that kernel's name."""
    kernel, _, case = name.partition("/")
    if not case:
        wanted = "mla_attend@prefill"
    else:
        wanted = f"experts_unfinalized{'_mxfp8' if kernel.endswith('_mxfp8') else ''}@{CALLS[case]}"
    (cell,) = [cell for cell in every_cell() if cell.name == wanted]
    return cell, kernel.removesuffix("_mxfp8").removeprefix("mla_") + "_kernel"


def candidates(name: str, target: str) -> tuple[Tiles, ...]:
    """Those of a part, the best first; none where it does not run the kernel."""
    return SPACES[name].get(FAMILY[target], ())


def compiled(name: str, tiles: Tiles, part: Part) -> dict[str, Any]:
    """The figures of one candidate."""
    cell, kernel = call_of(name)
    with trying({name: tiles}):
        launches = cell.launches(part.target)
    launch = next(one for one in launches if kernel == one.kernel.fn.__name__)
    return figures(launch, part).as_dict()


def measure(
    names: Iterable[str], parts: Iterable[Part], said: Callable[[str], None] = lambda line: None
) -> Table:
    """Every candidate of the named spaces, compiled now."""
    made: Table = {}
    for name in names:
        for part in parts:
            for tiles in candidates(name, part.target):
                said(f"{name} {part.target} {tiles.label}")
                made.setdefault(name, {}).setdefault(part.target, {})[tiles.label] = compiled(
                    name, tiles, part
                )
    return made


def fault(name: str, target: str, found: dict[str, Any]) -> str | None:
    """Why tiles with these figures may not ship, or None."""
    if found["spill"]:
        return f"spills {found['spill']} bytes a thread"
    if found["shared"] > PARTS[target].shared:
        return f"{found['shared']} bytes shared of {PARTS[target].shared}"
    floor = FEW_WARPS if name.endswith("/few") and "_mxfp8" not in name else WARPS
    if found["resident"] < floor:
        return f"{found['resident']} warps a core, fewer than {floor}"
    needed = dict(call_of(name)[0].needs).get(target)
    if needed and not found["found"].get(needed):
        return f"no {needed}"
    return None


def committed() -> dict[str, Table]:
    """Version of Triton -> table."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def write(version: str, made: Table) -> None:
    """Put the named spaces into the table to commit; the others of it stay."""
    kept = committed().get(version, {})
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{version}.json").write_text(json.dumps(kept | made, indent=1, sort_keys=True) + "\n")


def faults(name: str, target: str, tables: dict[str, Table]) -> Iterator[tuple[Tiles, str]]:
    """Each candidate with all that is against it in any version; an empty word where nothing is."""
    for tiles in candidates(name, target):
        against = []
        for version, table in tables.items():
            found = table.get(name, {}).get(target, {}).get(tiles.label)
            why = "not compiled" if found is None else fault(name, target, found)
            if why:
                against.append(f"Triton {version}: {why}")
        yield tiles, "; ".join(against)


def ships(name: str, target: str, tables: dict[str, Table]) -> Tiles | None:
    """The first candidate with nothing against it; None where all have, or there are none."""
    return next((tiles for tiles, against in faults(name, target, tables) if not against), None)


def shown(tables: dict[str, Table], names: Iterable[str], parts: Iterable[Part]) -> list[str]:
    """A line for each candidate: whether it ships, or why not."""
    lines = []
    for name in names:
        for target in [part.target for part in parts]:
            chosen = ships(name, target, tables)
            for tiles, against in faults(name, target, tables):
                said = against or ("ships" if tiles == chosen else "could ship")
                lines.append(f"{name:20} {target:7} {tiles.label:24} {said}")
    return lines

"""A checkpoint folder in a few lines, which ranks compare before any of them reads 1.5 TB.

    data     |#....#.....#...#......#....#...|      of each data file, besides its header: ranges of 4 KiB,
             first   one in each stretch   last     at the same places on every rank

Found are other names, sizes, shapes, dtypes and small files for certain, and other weights where training,
rounding or damage changed them nearly everywhere. Not found is a change of a few tensors, or of a part of
one, between the ranges: of a file of 10 GB they read a 40,000th. What every rank holds whole is compared once
it is loaded (statement.py); of the rest, of which no two ranks hold the same part, there is no cheap proof.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

RANGE = 4096  # bytes, a page of most file systems
RANGES = 64  # of a file
MOST_RANGES = 4096  # of a folder, 16 MiB: a second on a disk, some more over a network
FEWEST = 8  # of a file of a folder of very many
GOLDEN = 0.6180339887498949  # its multiples fall nowhere into step with rows of tensors


def describe_folder(folder: Path) -> dict[str, str]:
    """File name -> size and a hash, of a checkpoint's own files.

    Of a safetensors file the header is hashed, which holds names, shapes, dtypes and places, and samples of
    what follows; of others all.
    """
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".safetensors", ".json", ".model")
    ]
    data = sum(path.suffix == ".safetensors" for path in files)
    ranges = max(FEWEST, min(RANGES, MOST_RANGES // max(data, 1)))
    out = {}
    for path in files:
        made = hashlib.sha256(samples(path, ranges) if path.suffix == ".safetensors" else path.read_bytes())
        out[path.name] = f"{path.stat().st_size} bytes, {made.hexdigest()[:16]}"
    return out


def samples(path: Path, ranges: int) -> bytes:
    """The header of a safetensors file, or what there is of it (the loader says what is wrong with it), and
    so many ranges of the rest.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), size))
        parts, begin = [start, header], len(start) + len(header)
        for place, length in places(size - begin, ranges):
            file.seek(begin + place)
            parts.append(file.read(length))
    return b"".join(parts)


def places(size: int, ranges: int) -> list[tuple[int, int]]:
    """(place, length) of what is read of ``size`` bytes: all where that is no more than the ranges are; else
    the first, the last, and one somewhere in each stretch between.
    """
    if size <= ranges * RANGE:
        return [(0, size)]
    inner = ranges - 2
    stretch = (size - 2 * RANGE) / inner
    between = [int(RANGE + stretch * i + (stretch - RANGE) * (i * GOLDEN % 1.0)) for i in range(inner)]
    return [(place, RANGE) for place in (0, *between, size - RANGE)]

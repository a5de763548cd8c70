"""A directory of safetensors files: what it says it holds, held against what it really holds.

    model.safetensors.index.json    {"weight_map": {name: file}}   or one model.safetensors without an index

Headers are read at once, and values when they are asked for: a whole tensor, or a run along one dimension,
which is a view of the mapped file until it is copied. Whatever is wrong is collected, so that a broken
download is described once and whole. No other format is read: a pickle may run code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Header(NamedTuple):
    """What a file says about one of its tensors."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # the file's own word when torch has no such dtype


class Cut(NamedTuple):
    """The run ``start`` <= i < ``stop`` along dimension ``dim`` of a stored tensor."""

    dim: int
    start: int
    stop: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part."""
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


class SafetensorsDir:
    """Headers of all tensors by name, and ``problems``: everything that is wrong with the set of files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        self.headers: dict[str, Header] = {}
        self.unread: set[str] = set()  # files that are missing or broken
        self.index = self._read_index()
        for file in self._files():
            self._read_headers(file)
        if self.index is not None:
            self._compare(self.index)

    def explained(self, name: str) -> bool:
        """True when a complaint was made already that says why the tensor is not here."""
        if self.index is None:
            return bool(self.unread)
        return name in self.index

    def _read_index(self) -> Mapping[str, str] | None:
        """Name -> file, or None where there is no index."""
        path = self.path / INDEX
        if not path.exists():
            return None
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=self._no_twins)
            weight_map = parsed["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            self.problems.append(f"{INDEX} is no index: {error!r}")
            return {}
        good = isinstance(weight_map, dict) and all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        )
        if not good:
            self.problems.append(f"{INDEX}: weight_map must map tensor names to files in the same directory")
            return {}
        return weight_map

    def _no_twins(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """A JSON object, with a complaint for each name that stands in it twice."""
        made = dict(pairs)
        if len(made) != len(pairs):
            twins = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
            self.problems.append(f"{INDEX} names twice: {', '.join(twins)}")
        return made

    def _files(self) -> list[str]:
        """The files to read, in order."""
        present = sorted(p.name for p in self.path.glob("*.safetensors"))
        if self.index is None:
            if present == [SINGLE]:
                return present
            if present:
                self.problems.append(
                    f"there is no {INDEX} to say what belongs together: {', '.join(present)}"
                )
            else:
                self.problems.append(f"{self.path} holds neither {INDEX} nor {SINGLE}; nothing else is read")
            self.unread.add(SINGLE)
            return []
        expected = Counter(self.index.values())
        for stray in sorted(set(present) - set(expected)):
            self.problems.append(f"{stray} is not in {INDEX}: remove it, or finish the download")
        for file in sorted(set(expected) - set(present)):
            self.problems.append(f"{file} is missing ({expected[file]} tensors of {INDEX} should be in it)")
            self.unread.add(file)
        return sorted(set(expected) & set(present))

    def _read_headers(self, file: str) -> None:
        try:
            with safe_open(self.path / file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    part = handle.get_slice(name)
                    dtype = part.get_dtype()
                    header = Header(file, tuple(part.get_shape()), DTYPES.get(dtype, dtype))
                    if name in self.headers:
                        self.problems.append(f"{name} is both in {self.headers[name].file} and in {file}")
                    self.headers[name] = header
        except (SafetensorError, OSError) as error:
            self.problems.append(f"{file} cannot be read, it may be cut short: {error}")
            self.unread.add(file)

    def _compare(self, index: Mapping[str, str]) -> None:
        """Index against headers."""
        for name, file in index.items():
            found = self.headers.get(name)
            if found is None and file not in self.unread:
                self.problems.append(f"{name} should be in {file}, and is not")
            elif found is not None and found.file != file:
                self.problems.append(f"{name} should be in {file}, and is in {found.file}")
        for name, header in self.headers.items():
            if name not in index:
                self.problems.append(f"{name} is in {header.file}, and {INDEX} does not know it")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each named tensor, file by file; one file is mapped at a time, so copy what you keep."""
        return self.parts(dict.fromkeys(names))

    def parts(self, cuts: Mapping[str, Cut | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of a run of each tensor; None: all of it. Nothing outside a run is read."""
        by_file: dict[str, list[str]] = {}
        for name in cuts:
            by_file.setdefault(self.headers[name].file, []).append(name)
        for file in sorted(by_file):
            with safe_open(self.path / file, framework="pt") as handle:
                for name in by_file[file]:
                    yield name, read_part(handle, name, cuts[name])

    def rows(self, name: str, at_once: int) -> Iterator[torch.Tensor]:
        """A tensor, some of its rows at a time."""
        header = self.headers[name]
        with safe_open(self.path / header.file, framework="pt") as handle:
            for start in range(0, header.shape[0], at_once):
                yield read_part(handle, name, Cut(0, start, min(start + at_once, header.shape[0])))

    def num_bytes(self, cuts: Mapping[str, Cut | None]) -> int:
        """What ``parts`` reads."""
        total = 0
        for name, cut in cuts.items():
            _, shape, dtype = self.headers[name]
            assert isinstance(dtype, torch.dtype), f"{name}: {dtype}"
            total += torch.Size(shape if cut is None else cut.shape(shape)).numel() * dtype.itemsize
        return total


def read_part(handle: Any, name: str, cut: Cut | None) -> torch.Tensor:
    """A tensor of an open file, or a run of it."""
    if cut is None:
        return handle.get_tensor(name)
    return handle.get_slice(name)[(*[slice(None)] * cut.dim, slice(cut.start, cut.stop))]

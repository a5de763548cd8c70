"""Change a checkpoint directory on disk: one shard's tensors, or the index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def shard_of(path: Path, name: str) -> Path:
    """The file that the index gives for a tensor."""
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]


def edit_tensor(path: Path, name: str, change: Callable) -> None:
    """Replace one tensor by ``change(tensor)``."""
    file = shard_of(path, name)
    tensors = load_file(file)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)


def edit_shard(file: Path, change: Callable[[dict], None]) -> None:
    """Let ``change`` alter the tensors of one file in place."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_index(path: Path, change: Callable[[dict], None]) -> None:
    """Let ``change`` alter the weight map in place."""
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def edit_config(path: Path, change: Callable[[dict], None]) -> None:
    """Let ``change`` alter config.json in place."""
    raw = json.loads((path / "config.json").read_text())
    change(raw)
    (path / "config.json").write_text(json.dumps(raw))


def merge_shards(path: Path) -> None:
    """All shards as one model.safetensors without an index."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (path / INDEX).unlink()
    save_file(tensors, path / "model.safetensors")

"""Write a draft's folder; make one of random weights beside a made checkpoint, the same bytes for a seed.

    DIR/                        the target, from make_checkpoint with the same preset and seed
    DIR/draft/                  model.safetensors, then config.json; embed_tokens is the target's

Random drafts are almost never accepted. They are for tests, and a shape to train into.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..checkpoint import MARKER, draw, write_bytes, write_json
from ..config import K3Config
from ..layout import entries as target_entries
from ..presets import DRAFTS, PRESETS, draft_config_json
from ..safetensors_dir import SINGLE
from .dspark_config import DSparkConfig
from .dspark_layout import SHARED, entries
from .dspark_weights import FOLDER


def check_preset(preset: str) -> None:
    """Raise ValueError for a preset without a draft."""
    if preset not in DRAFTS:
        raise ValueError(f"preset {preset!r} has no DSpark draft; there is one for {', '.join(DRAFTS)}")


def make_draft(path: str | Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """Write ``path``/draft for the checkpoint that make_checkpoint wrote into ``path``, and return it.

    One that is there is left alone. Raises ValueError for a folder that was not made so, and for a preset
    without a draft.
    """
    path, marker = Path(path), Path(path) / MARKER
    if not marker.is_file():
        raise ValueError(f"{path} has no {MARKER}: make the checkpoint first, its draft comes after it")
    made = json.loads(marker.read_text(encoding="utf-8"))
    check_preset(made["preset"])
    folder = path / FOLDER
    if not (folder / "config.json").exists():
        size = PRESETS[made["preset"]]
        raw = draft_config_json(size, DRAFTS[made["preset"]])
        write_draft(folder, raw, random_tensors(raw, K3Config.from_file(path), made["preset"], made["seed"]))
        report(f"wrote {FOLDER}/model.safetensors")
    return folder


def random_tensors(raw: dict, target: K3Config, preset: str, seed: int) -> dict[str, Tensor]:
    """Every tensor of the file, drawn by its name."""
    embedding = next(entry.name for entry in target_entries(target) if entry.parameter == "embed_tokens")
    found = {}
    for entry in entries(DSparkConfig.from_dict(raw, target)):
        name = embedding if entry.name == SHARED else f"draft.{entry.name}"
        values = draw(name, entry.shape, seed, target, PRESETS[preset])
        found[entry.name] = torch.from_numpy(values).to(entry.dtype)
    return found


def write_draft(path: str | Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a draft's folder: ``raw`` is its config.json, which comes last. Raises ConfigError for a
    configuration that could not be read back, ValueError for tensors that are not its own.
    """
    wanted = {entry.name: (entry.shape, entry.dtype) for entry in entries(DSparkConfig.from_dict(raw))}
    given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if given != wanted:
        wrong = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
        raise ValueError(f"these tensors are not those of the configuration: {', '.join(wrong[:20])}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_bytes(path / SINGLE, save(dict(tensors), {"format": "pt"}))
    write_json(path / "config.json", dict(raw))

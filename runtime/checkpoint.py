"""Make a checkpoint of random weights in the released layout, so that nothing has to be downloaded.

    make-checkpoint.json                 what is being made; written first, so a stopped run can go on
    model-00001-of-00000N.safetensors    each written beside its place and renamed
    model.safetensors.index.json         written last of the weights: without it nothing loads
    config.json  generation_config.json  tiktoken.model  tokenizer_config.json  hf-tokenizer/

Each tensor's numbers depend on the seed and its name alone: the same seed gives the same bytes, whatever is
made first. Scales are chosen so that activations stay near 1 and different tokens choose different experts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from k3compile.kernels.mxfp4 import pack
from safetensors.torch import save
from torch import Tensor

from .config import GROUP, K3Config
from .hf_tokenizer import write_hf_tokenizer
from .layout import Entry, entries
from .presets import EOS, PRESETS, Preset, config_json
from .safetensors_dir import INDEX
from .tokenizer import Tokenizer
from .tokenizer_train import train_bpe

MARKER = "make-checkpoint.json"
PART = ".part"  # behind the name of a file that is being written
FORMAT = 1  # raised when the same preset and seed start to give other bytes


def make_checkpoint(
    path: str | Path, preset: str = "tiny", seed: int = 0, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Write a checkpoint of ``preset`` into a new or empty directory and return it.

    A directory that was begun with the same preset and seed is completed; one that is complete is left alone.
    report: told about each file. Raises ValueError for an unknown preset, and for a directory that holds
    anything else.
    """
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    path, size = Path(path), PRESETS[preset]
    claim(path, {"preset": preset, "seed": seed, "format": FORMAT})
    raw = config_json(size)
    config = K3Config.from_dict(raw)
    write_tokenizer(path, size)
    weight_map, total = {}, 0
    shards = list(split(config, size.shard_bytes))
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        weight_map |= {entry.name: file for entry in shard}
        total += sum(num_bytes(entry) for entry in shard)
        if not (path / file).exists():
            tensors = dict(weights(shard, config, size, seed))
            write_bytes(path / file, save(tensors, {"format": "pt"}))
            report(f"wrote {file} ({len(shard)} tensors)")
    write_json(path / "generation_config.json", {"max_length": 1048576, "eos_token_id": size.ranks + EOS})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(path / INDEX, index)
    write_json(path / "config.json", raw)  # last: where it stands, the checkpoint is whole
    report(f"{preset} (seed {seed}): {len(weight_map)} tensors, {total:,} bytes in {path}")
    return path


def claim(path: Path, what: dict) -> None:
    """Make the directory ours, or raise ValueError because it holds something else."""
    path.mkdir(parents=True, exist_ok=True)
    marker = path / MARKER
    if marker.exists():
        found = marker.read_text(encoding="utf-8")
        if found != to_json(what):
            raise ValueError(
                f"{path} holds another checkpoint ({found.strip()}): delete it or choose another"
            )
    elif any(file.name != MARKER + PART for file in path.iterdir()):
        raise ValueError(f"{path} is not empty and was not made here: choose a new directory")
    else:
        write_json(marker, what)


def num_bytes(entry: Entry) -> int:
    """Bytes of a tensor in the file."""
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def split(config: K3Config, shard_bytes: int) -> Iterator[list[Entry]]:
    """The tensors in model order, in runs of about ``shard_bytes``."""
    shard: list[Entry] = []
    size = 0
    for entry in entries(config):
        if shard and size + num_bytes(entry) > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += num_bytes(entry)
    yield shard


def weights(
    shard: Iterable[Entry], config: K3Config, size: Preset, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Name and values of each tensor of a shard. A packed matrix and its scales come from one draw."""
    base, halves = "", {}
    for entry in shard:
        if entry.dtype != torch.uint8:
            values = draw(entry.name, entry.shape, seed, config, size)
            yield entry.name, torch.from_numpy(values).to(entry.dtype)
            continue
        name, kind = entry.name.rsplit("_", 1)
        if name != base:
            columns = entry.shape[1] * (2 if kind == "packed" else GROUP)
            matrix = draw(name, (entry.shape[0], columns), seed, config, size)
            base, halves = name, dict(zip(("packed", "scale"), pack(torch.from_numpy(matrix))))
        yield entry.name, halves[kind]


def draw(name: str, shape: tuple[int, ...], seed: int, config: K3Config, size: Preset) -> np.ndarray:
    """Float64 values of one tensor."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    normal = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(shape)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("norm"):
        return 1 + 0.1 * normal
    if leaf == "embed_tokens":
        return normal
    if leaf == "A_log":
        values = 0.3 * normal
        if config.family == "kimi_k3":
            values[config.kda_num_heads :] = 0
        return values
    if leaf == "dt_bias":  # decays between 0.6 and 0.999 a token: some channels forget, some remember
        return 1.5 * normal - 3
    if leaf == "e_score_correction_bias":
        return 0.05 * normal
    if leaf.endswith("conv1d"):
        return 0.5 * normal
    values = normal * shape[-1] ** -0.5
    if leaf == "lm_head":
        quiet = (
            np.arange(shape[0]) >= size.ranks
        )  # control tokens are rare in text, except the last of a message
        quiet[size.ranks + EOS] = False
        values[quiet] *= 0.1
    return values


def write_tokenizer(path: Path, size: Preset) -> None:
    """The rank file, the released tokenizer settings, and the same tokenizer for Hugging Face clients."""
    ranks = train_bpe(None, size.ranks)
    write_bytes(path / "tiktoken.model", ranks)
    control = Tokenizer(path).control_ids
    unmarked = ("<|open|>", "<|close|>", "<|sep|>")  # the release flags these three as not special
    decoder = {
        str(index): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in unmarked,
        }
        for name, index in control.items()
    }
    settings = {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "TikTokenTokenizer",
    }
    write_json(path / "tokenizer_config.json", settings)
    write_hf_tokenizer(path / "hf-tokenizer", ranks)


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside ``path`` and rename, so that a file is whole or absent."""
    beside = path.with_name(path.name + PART)
    beside.write_bytes(data)
    os.replace(beside, path)


def to_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """Write one JSON file, whole or not at all."""
    write_bytes(path, to_json(value).encode())

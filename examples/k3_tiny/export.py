"""Trained weights into the released layout: the names, dtypes and shards that k3 make-checkpoint gives.

master layers.3.ffn.experts.w1[5]   --pack-->   ...block_sparse_moe.experts.5.w1.weight_packed, _scale
master layers.0.self_attn.a_log [8] --pad--->   ...self_attn.A_log [128]
"""

from __future__ import annotations

from pathlib import Path

import torch
from k3compile.kernels.mxfp4 import pack
from k3compile.runtime.checkpoint import num_bytes, split, write_bytes, write_json, write_tokenizer
from k3compile.runtime.config import K3Config
from k3compile.runtime.layout import Entry
from k3compile.runtime.presets import EOS, PRESETS, config_json
from k3compile.runtime.safetensors_dir import INDEX
from safetensors.torch import save
from torch import Tensor

PRESET = PRESETS["tiny"]


def tiny() -> K3Config:
    """The configuration that is trained."""
    return K3Config.from_dict(config_json(PRESET))


def export(path: Path, master: dict[str, Tensor]) -> None:
    """Write the checkpoint of ``master`` (float32, experts unpacked) into ``path``, over an older one."""
    config, weight_map, total = tiny(), {}, 0
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, PRESET)
    shards = list(split(config, PRESET.shard_bytes))
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        write_bytes(path / file, save({e.name: stored(e, master) for e in shard}, {"format": "pt"}))
        weight_map |= {entry.name: file for entry in shard}
        total += sum(num_bytes(entry) for entry in shard)
    write_json(path / "generation_config.json", {"max_length": 1048576, "eos_token_id": PRESET.ranks + EOS})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(path / INDEX, index)
    write_json(path / "config.json", config_json(PRESET))


def stored(entry: Entry, master: dict[str, Tensor]) -> Tensor:
    """One tensor of the file."""
    if entry.dtype == torch.uint8:
        codes, scales = pack(master[entry.parameter.removesuffix("_scale")][entry.index])
        return scales if entry.parameter.endswith("_scale") else codes
    value = master[entry.parameter]
    value = (value if entry.index is None else value[entry.index]).flatten()
    whole = torch.zeros(torch.Size(entry.shape).numel())
    whole[: value.numel()] = value
    return whole.view(entry.shape).to(entry.dtype)

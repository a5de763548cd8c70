"""From a released checkpoint to a filled Model, or to one error that lists everything that is wrong.

    headers  --compare-->  missing, unknown, wrong shape or dtype       before any weight is read
    tensors  --check---->  NaN, scale bytes, zero tail, magnitude       as each is copied in
    model    --check---->  a parameter that was not filled              at the end

Parameters are made first and hold NaN (bytes: 255) until a tensor is copied in, so memory peaks at the model
plus one tensor. Experts stay packed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .config import K3Config
from .layout import UNUSED, Entry, entries, expected_tensors, head_name
from .model import Model
from .parallel import world_size
from .safetensors_dir import SafetensorsDir

__all__ = ["CheckpointError", "Examined", "examine", "expected_tensors", "load_model"]

logger = logging.getLogger(__name__)

SHOWN = 60  # problems in the text of an error; the attribute holds all
CHUNK = 1 << 20  # elements that a check looks at together
LOWEST_SCALE, HIGHEST_SCALE = 127 - 24, 127 + 4  # of the largest group of a plausible expert matrix


class CheckpointError(ValueError):
    """A checkpoint we will not serve; ``problems`` lists every reason."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = problems
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        super().__init__("\n  ".join([f"cannot load {path}:", *problems[:SHOWN], *more]))


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    resident: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    latent_norm_eps: float = 1e-5,
    tap_layers: tuple[int, ...] = (),
    state_replay: bool = True,
) -> Model:
    """A Model of ``dtype``, its matrices kept in ``resident`` (default ``dtype``), filled from a directory.

    Raises ConfigError or CheckpointError (both ValueError) listing all that is wrong, before anything is
    served; ValueError under several ranks.
    """
    if world_size() != 1:
        raise ValueError(f"{world_size()} ranks share the process group; a checkpoint is loaded whole by one")
    path = Path(path)
    config, files, wanted, problems = examine(path, latent_norm_eps)
    if problems:
        raise CheckpointError(path, problems)
    model = Model(config, dtype, device, resident, tap_layers, state_replay)
    problems = fill(model, files, wanted)
    if problems:
        raise CheckpointError(path, problems)
    return model


class Examined(NamedTuple):
    """A checkpoint whose headers were read, and whose values were not."""

    config: K3Config
    files: SafetensorsDir
    wanted: dict[str, Entry]  # by name, every tensor that must be there
    problems: list[str]


def examine(path: Path, latent_norm_eps: float = 1e-5) -> Examined:
    """Read configuration, headers, and a tied model's head. Raises ConfigError for what we do not run."""
    config = K3Config.from_file(path, latent_norm_eps)
    files = SafetensorsDir(path)
    packed = [name.endswith(".weight_packed") for name in files.headers if ".experts." in name]
    config = dataclasses.replace(config, experts_packed=any(packed) if packed else config.experts_packed)
    if config.tie_word_embeddings and has_own_head(config, files):
        logger.warning("tie_word_embeddings is true, but the checkpoint has a head of its own: it is used")
        config = dataclasses.replace(config, tie_word_embeddings=False)
    wanted = {entry.name: entry for entry in entries(config)}
    return Examined(config, files, wanted, files.problems + compare(files, config, wanted))


def compare(files: SafetensorsDir, config: K3Config, wanted: dict[str, Entry]) -> list[str]:
    """Names, shapes and dtypes: what the files hold against what the configuration asks for."""
    problems, skipped = [], 0
    tied_head = head_name(config) if config.tie_word_embeddings else None
    for name, header in files.headers.items():
        if name.startswith(UNUSED):
            skipped += 1
        elif name not in wanted and name != tied_head:
            problems.append(f"{name} in {header.file} is not a tensor of this model")
    for name, entry in wanted.items():
        header = files.headers.get(name)
        if header is None:
            if not files.explained(name):
                problems.append(f"{name} {list(entry.shape)} is missing")
            continue
        allowed = {entry.dtype}
        if config.family == "kimi_linear" and entry.dtype == torch.float32:
            allowed.add(getattr(torch, config.dtype))  # that release does not say which it keeps in float32
        if header.shape != entry.shape:
            problems.append(f"{name} has shape {list(header.shape)}, and must have {list(entry.shape)}")
        if header.dtype not in allowed:
            problems.append(f"{name} is {header.dtype}, and must be {entry.dtype}")
    if skipped:
        logger.info("skipped %d tensors of the vision tower and its projector: text only", skipped)
    return problems


def fill(model: Model, files: SafetensorsDir, wanted: dict[str, Entry]) -> list[str]:
    """Copy every tensor into its parameter; what is wrong with the values, and what stayed unfilled."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(float("nan") if parameter.is_floating_point() else 255)
    problems: list[str] = []
    filled: Counter[str] = Counter()
    for name, tensor in files.tensors(list(wanted)):
        entry = wanted[name]
        problems += value_problems(name, tensor)
        part = parameters[entry.parameter]
        part = part if entry.index is None else part[entry.index]
        values = tensor.flatten()
        if values.numel() > part.numel() and values[part.numel() :].any():
            problems.append(f"{name} must be zero past its first {part.numel()} values")
        part.copy_(values[: part.numel()].view(part.shape))
        filled[entry.parameter] += part.numel()
    for name, parameter in parameters.items():
        assert filled[name] == parameter.numel(), f"{name}: {filled[name]} of {parameter.numel()} values"
    return problems


def value_problems(name: str, tensor: Tensor) -> list[str]:
    """Values no trained model has: not finite, or an expert matrix of absurd size."""
    if tensor.is_floating_point():
        finite = all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(CHUNK))
        return [] if finite else [f"{name} holds NaN or infinity"]
    if not name.endswith(".weight_scale"):
        return []
    low, high = (int(bound) for bound in tensor.aminmax())
    if low == 0 or high == 255:
        return [f"{name} holds the scale byte {0 if low == 0 else 255}, which stands for no size"]
    if not LOWEST_SCALE <= high <= HIGHEST_SCALE:
        largest = f"6 x 2^{high - 127}"
        return [f"{name}: the largest weight is {largest}, which is implausible; is the exponent offset 127?"]
    return []


def has_own_head(config: K3Config, files: SafetensorsDir) -> bool:
    """Whether a head is stored that is not the embedding: a flag must not drop a real head silently."""
    embedding = next(name for name in expected_tensors(config) if name.endswith("embed_tokens.weight"))
    head, tied = files.headers.get(head_name(config)), files.headers.get(embedding)
    if head is None or tied is None or files.problems:
        return False
    if (head.shape, head.dtype) != (tied.shape, tied.dtype):
        return True
    both = {name: tensor.clone() for name, tensor in files.tensors([head_name(config), embedding])}
    return not torch.equal(both[head_name(config)], both[embedding])

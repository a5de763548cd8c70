"""From a released checkpoint to a filled Model, or to one error that lists everything that is wrong.

    headers  --compare-->  missing, unknown, wrong shape or dtype       before any weight is read
    tensors  --check---->  NaN, scale bytes, zero tail, magnitude       as each is copied in
    model    --check---->  a parameter that was not filled              at the end

Parameters are made first and hold NaN (bytes: 255) until a tensor is copied in, so memory peaks at the model
plus one tensor. Experts stay packed. Of several ranks each reads its own part of every tensor and no more
(parallel/sharding.py); headers are compared by all, values by whoever reads them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .config import K3Config
from .layout import UNUSED, Entry, entries, expected_tensors, head_name
from .model import Model
from .parallel.ranks import Ranks
from .parallel.sharding import TARGET, Shard, Split, part_of, split_of
from .safetensors_dir import SafetensorsDir

if TYPE_CHECKING:
    from .speculate.dspark_model import DSparkModel

__all__ = ["CheckpointError", "Examined", "examine", "expected_tensors", "load_model"]

logger = logging.getLogger(__name__)

SHOWN = 60  # problems in the text of an error; the attribute holds all
CHUNK = 1 << 17  # elements that a check looks at together
ROWS = 1 << 10  # of two matrices that are compared
LOWEST_SCALE, HIGHEST_SCALE = 127 - 24, 127 + 4  # of the largest group of a plausible expert matrix


Report = Callable[[int, int], None]  # bytes done, bytes in all


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
    ranks: Ranks | None = None,
    report: Report | None = None,
) -> Model:
    """A Model of ``dtype``, its matrices kept in ``resident`` (default ``dtype``), filled from a directory.

    ranks: who shares the model, default all ranks of this process group; only this rank's part is read.
    report: is told how many of the bytes to read are in the model.

    Raises ConfigError or CheckpointError (both ValueError) listing all that is wrong, before anything is
    served; ValueError for what the ranks cannot divide. A bad value is found by the ranks that read it.
    """
    path = Path(path)
    config, files, wanted, problems = examine(path, latent_norm_eps)
    if problems:
        raise CheckpointError(path, problems)
    model = Model(config, dtype, device, resident, tap_layers, state_replay, ranks)
    problems = fill(model, files, wanted, TARGET, report)
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


def fill(
    model: Model | DSparkModel,
    files: SafetensorsDir,
    wanted: Mapping[str, Entry],
    table: Mapping[str, Split],
    report: Report | None = None,
) -> list[str]:
    """Copy this rank's part of every tensor into its parameter; what is wrong with the values."""
    ranks, parameters = model.place.ranks, dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(float("nan") if parameter.is_floating_point() else 255)
    splits = {name: split_of(table, name) for name in parameters}
    cuts = {name: entry.cut(splits[entry.parameter], ranks) for name, entry in wanted.items()}
    total, done = files.num_bytes(cuts), 0
    problems: list[str] = []
    filled: Counter[str] = Counter()
    for name, tensor in files.parts(cuts):
        entry = wanted[name]
        split, part = splits[entry.parameter], parameters[entry.parameter]
        problems += value_problems(name, tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        index = entry.of_rank(split, ranks)
        part = part if index is None else part[index]
        if entry.reshaped:
            shape, values = whole_shape(part, split, ranks), tensor.flatten()
            if values[shape.numel() :].any():
                problems.append(f"{name} must be zero past its first {shape.numel()} values")
            tensor = part_of(values[: shape.numel()].view(shape), split, ranks)
        part.copy_(tensor.view(part.shape))
        filled[entry.parameter] += part.numel()
        done += num_bytes
        if report is not None:
            report(done, total)
    for name, parameter in parameters.items():
        assert filled[name] == parameter.numel(), f"{name}: {filled[name]} of {parameter.numel()} values"
    return problems


def whole_shape(part: Tensor, split: Split, ranks: Ranks) -> torch.Size:
    """Of the parameter that all ranks' parts make."""
    cut = split.dim if isinstance(split, Shard) else None
    return torch.Size(size * ranks.size if dim == cut else size for dim, size in enumerate(part.shape))


def value_problems(name: str, tensor: Tensor) -> list[str]:
    """Values no trained model has: not finite, or an expert matrix of absurd size."""
    if tensor.is_floating_point():
        rows = max(CHUNK * len(tensor) // tensor.numel(), 1)  # as it lies: a run of columns is not copied
        finite = all(bool(torch.isfinite(part).all()) for part in tensor.split(rows))
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
    pairs = zip(files.rows(head_name(config), ROWS), files.rows(embedding, ROWS), strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)

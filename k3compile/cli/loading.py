"""From a checkpoint folder to an engine that is ready to start, for the verbs that serve."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.engine_config import EngineConfig
    from ..runtime.model import Model
    from ..runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float64")
SHIPPED = Path(__file__).resolve().parent.parent / "data" / "k3-tiny"


class Loaded(NamedTuple):
    """A model with the engine that serves it uncompiled; ``engine`` is not started."""

    model: Model
    engine: Engine
    tokenizer: Tokenizer


def or_shipped(path: str | Path | None) -> Path:
    """``path``, or the trained tiny model of the package. Raises ``ValueError`` where that is missing."""
    if path is not None:
        return Path(path)
    if not (SHIPPED / "config.json").is_file():
        raise ValueError(
            "no checkpoint is given, and the trained tiny model did not come with this installation: "
            "give a folder, such as `k3 make-checkpoint --preset tiny DIR` makes"
        )
    return SHIPPED


def check_checkpoint(path: Path) -> None:
    """Raise ``ValueError`` early for a folder that is no checkpoint."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder of a checkpoint")
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder: make a checkpoint with `k3 make-checkpoint --preset tiny {path}`"
        )
    missing = [name for name in ("config.json", "tiktoken.model") if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{path} is no checkpoint: it has no {' and no '.join(missing)}")


def load(
    path: Path,
    config: EngineConfig,
    dtype: str = "float32",
    resident: str | None = None,
    draft: Path | None = None,
) -> Loaded:
    """Load a checkpoint, and the draft that proposes ``config.num_drafts`` tokens: of folder ``draft``, or of
    n-grams.

    Raises ``ValueError`` saying all that is wrong with a checkpoint or with the settings.
    """
    check_checkpoint(path)
    check_dtype("dtype", dtype)
    check_dtype("resident", resident or dtype)
    import torch

    from ..runtime.make_engine import make_engine
    from ..runtime.tokenizer import Tokenizer
    from ..runtime.weights import load_model

    log.info("loading %s", path)
    start = time.perf_counter()
    tokenizer = Tokenizer(path)
    kept = getattr(torch, resident) if resident else None
    model = load_model(path, dtype=getattr(torch, dtype), resident=kept, state_replay=config.state_replay)
    if tokenizer.vocab_size != model.config.vocab_size:
        ours, theirs = tokenizer.vocab_size, model.config.vocab_size
        raise ValueError(f"{path}: the tokenizer has {ours} ids, config.json says {theirs}")
    log.info("loaded %s in %.1f s", path, time.perf_counter() - start)
    return Loaded(model, make_engine(model, config), tokenizer)


def check_dtype(name: str, value: str) -> None:
    if value not in DTYPES:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(DTYPES)}")


def log_to_stderr(level: str = "info") -> None:
    """One line a message, with the time."""
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"log-level is {level!r}; allowed: debug, info, warning, error")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))

"""From a checkpoint folder to an engine that is ready to start, for the verbs that serve.

load_weights    model, draft, tokenizer       on every rank, of which each reads its own part
load            the same with an engine       in one process
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..serving import DRAFT_FOLDER
from .progress import loading_progress

if TYPE_CHECKING:
    import torch

    from ..forward import CompiledForward, Pools
    from ..options import CompileOptions
    from ..runtime.engine import Engine
    from ..runtime.engine_config import EngineConfig
    from ..runtime.model import Model
    from ..runtime.parallel.agreement import Meeting
    from ..runtime.parallel.ranks import Ranks
    from ..runtime.speculate.dspark_model import DSparkModel
    from ..runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float64")
DEVICES = ("cpu", "cuda")
SHIPPED = Path(__file__).resolve().parent.parent / "data" / "k3-tiny"


class Weights(NamedTuple):
    """One rank's part of a model and of the draft that it has."""

    model: Model
    draft: DSparkModel | None
    tokenizer: Tokenizer


class Loaded(NamedTuple):
    """A model with the engine that serves it uncompiled; ``engine`` is not started. ``pools``: those of the
    engine's that the model's own layers advance.
    """

    model: Model
    engine: Engine
    tokenizer: Tokenizer
    pools: Pools

    def compile(self, options: CompileOptions) -> CompiledForward:
        """Compile the model, which takes minutes where nothing is cached, and let the engine use it."""
        from ..forward import compile_forward

        made = compile_forward(self.model, self.pools, options, self.engine.config.max_num_seqs)
        self.engine.use(made)
        return made


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


def drafts_of(num_drafts: int | None, checkpoint: Path) -> int:
    """``num_drafts``, or where nothing was said as many as the draft of the package's own model proposes at
    once; none for another model, whose draft may not pay.
    """
    config = SHIPPED / DRAFT_FOLDER / "config.json"
    if num_drafts is not None or checkpoint != SHIPPED or not config.is_file():
        return num_drafts or 0
    return json.loads(config.read_text(encoding="utf-8"))["block_size"]


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
    device: torch.device | str = "cpu",
) -> Loaded:
    """Load a checkpoint, and the draft that proposes ``config.num_drafts`` tokens: of folder ``draft``, or of
    n-grams. All of it on ``device``.

    Raises ``ValueError`` saying all that is wrong with a checkpoint or with the settings.
    """
    from ..runtime.make_engine import make_engine
    from ..runtime.speculate.make_drafter import targets_own

    model, drafting, tokenizer = load_weights(path, config, dtype, resident, draft, device=device)
    engine = make_engine(model, config, draft=drafting)
    return Loaded(model, engine, tokenizer, targets_own(engine.pools, drafting))


def load_weights(
    path: Path,
    config: EngineConfig,
    dtype: str = "float32",
    resident: str | None = None,
    draft: Path | None = None,
    *,
    ranks: Ranks | None = None,
    device: torch.device | str = "cpu",
    meeting: Meeting | None = None,
) -> Weights:
    """The model, and the draft if ``config`` has use for one, on ``device``.

    ranks: who shares the model, of whom each reads its part; None: this process alone. meeting: where several
    tell each other how far they are. Raises as :func:`load`, and what ``Meeting.progress`` raises.
    """
    check_checkpoint(path)
    check_dtype("dtype", dtype)
    check_dtype("resident", resident or dtype)
    import torch

    from ..runtime.config import K3Config
    from ..runtime.speculate.dspark_weights import load_draft
    from ..runtime.tokenizer import Tokenizer
    from ..runtime.weights import load_model

    log.info("loading %s", path)
    start = time.perf_counter()
    tokenizer = Tokenizer(path)
    placed = {
        "dtype": getattr(torch, dtype),
        "resident": getattr(torch, resident) if resident else None,
        "device": device,
        "ranks": ranks,
    }
    drafting = None
    with loading_progress(meeting) as report:
        if config.num_drafts and draft is not None:
            drafting = load_draft(draft, K3Config.from_file(path), **placed, report=report)
        model = load_model(
            path,
            **placed,
            tap_layers=drafting.config.target_layer_ids if drafting else (),
            state_replay=config.state_replay,
            report=report,
        )
    if tokenizer.vocab_size != model.config.vocab_size:
        ours, theirs = tokenizer.vocab_size, model.config.vocab_size
        raise ValueError(f"{path}: the tokenizer has {ours} ids, config.json says {theirs}")
    log.info("loaded %s in %.1f s", path, time.perf_counter() - start)
    return Weights(model, drafting, tokenizer)


def check_dtype(name: str, value: str) -> None:
    if value not in DTYPES:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(DTYPES)}")


def check_device(kind: str) -> None:
    """Raise ValueError for a device that we do not know, or that this machine has not."""
    if kind not in DEVICES:
        raise ValueError(f"device is {kind!r}; allowed: {', '.join(DEVICES)}")
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"device is 'cuda', and torch {torch.__version__} sees no GPU on this machine")


def log_to_stderr(level: str = "info", rank: int = 0) -> None:
    """One line a message, with the time. Of another rank than 0 only warnings, each line with its number,
    and whatever ends it.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"log-level is {level!r}; allowed: debug, info, warning, error")
    wanted = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler()
    handler.setFormatter(RankFormatter(f"[rank {rank}] " if rank else ""))
    logging.basicConfig(level=max(wanted, logging.WARNING) if rank else wanted, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    if rank:
        logging.captureWarnings(True)
        sys.excepthook = lambda *error: log.critical("this rank ended by an error", exc_info=error)


class RankFormatter(logging.Formatter):
    """Every line of a message behind the same mark: lines of several processes mix on a terminal."""

    def __init__(self, mark: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.mark = mark

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "\n".join(self.mark + line for line in text.splitlines()) if self.mark else text

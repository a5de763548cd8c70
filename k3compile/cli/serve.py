"""`k3 serve [DIR]`: an OpenAI-compatible server for one checkpoint, the trained tiny one when none is named.

One process answers as soon as the weights are loaded, with the model as it is written; compilation goes on
behind, and the engine changes over between two steps. Several, started by torchrun, compile first
(serve_ranks.py).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import CompileOptions, read_switches
from ..runtime.engine_config import EngineConfig
from ..runtime.parallel.watch_config import WatchConfig
from ..runtime.server.server_config import ServerConfig
from ..serving import SET_BY_FEATURES, plan
from .door import Asked, answer, leave, open_door
from .flags import pick, with_flags
from .loading import (
    DTYPES,
    Loaded,
    check_checkpoint,
    check_device,
    check_dtype,
    drafts_of,
    load,
    log_to_stderr,
    or_shipped,
)

if TYPE_CHECKING:
    from ..runtime.parallel.launch import Seat

log = logging.getLogger(__name__)


def serve_checkpoint(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Folder with config.json, tiktoken.model and weights; default: the tiny one."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The same folder, said as an option.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share every layer; start them with torchrun.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks among them that share the latents of a token.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of activations and caches: {', '.join(DTYPES)}.")] = "float32",
    resident: Annotated[str | None, typer.Option(help="Of the weights in memory; default: dtype.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: of each rank its own GPU.")] = "cpu",
    model_name: Annotated[str | None, typer.Option(help="Name for clients; default: the folder's.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile while serving, with several ranks before.")
    ] = True,
    features: Annotated[str, typer.Option(help="default, all, baseline, plain, or names.")] = "default",
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep what prompts have in common.")
    ] = True,
    num_drafts: Annotated[
        int | None, typer.Option(help="Of a request in a step, 0 to 16; default: 0, with the tiny one 8.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of a DSpark draft; default: draft/ in the checkpoint.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "info",
    **flags: Any,
) -> int:
    """Serve a checkpoint over HTTP with OpenAI's API until SIGINT, SIGTERM or SIGHUP."""
    given = dict(locals())  # every option by its name
    given |= given.pop("flags")
    seat = take_seat(tp, log_level)
    if seat is None:
        serve_alone(asked_by(given))
    else:
        from .serve_ranks import serve_together

        serve_together(seat, lambda: asked_by(given))
    return 0


serve = with_flags(
    serve_checkpoint,
    (EngineConfig, (*SET_BY_FEATURES, "prefix_cache", "num_drafts")),
    (ServerConfig, ("model_name",)),
    (CompileOptions, ()),
    (WatchConfig, ()),
)
serve.__name__ = "serve"


def take_seat(tp: int, log_level: str) -> Seat | None:
    """This process among those that torchrun started, None where it is alone; from here on it logs.

    Raises ValueError for another number of processes than ``tp``, with the command that starts as many.
    """
    from ..runtime.parallel import launch

    seat = launch.seat()
    log_to_stderr(log_level, seat.rank if seat else 0)
    program = [sys.argv[0]] if sys.argv[0].endswith("serve.py") else ["-m", "k3compile.cli.main"]
    launch.check(seat, tp, [*program, *sys.argv[1:]])
    return seat if tp > 1 else None


def asked_by(given: Mapping[str, Any]) -> Asked:
    """What the options ask for. Raises ValueError saying what is wrong with them."""
    folder = folder_of(given["checkpoint"], given["model"])
    for name in ("dtype", "resident"):
        check_dtype(name, given[name] or given["dtype"])
    own = {"model_name": given["model_name"] or folder.resolve().name}
    if given["api_key_file"] is not None:
        own["api_key"] = read_key(given["api_key_file"])
    server = pick(ServerConfig, {**given, **own})
    options = pick(CompileOptions, {**given, "features": chosen(given["features"])})
    engine = pick(EngineConfig, {**given, "num_drafts": drafts_of(given["num_drafts"], folder)})
    launched = {"compiled": given["compiled"], "ranks": given["tp"], "context_ranks": given["dcp"]}
    serving = plan(engine, options, checkpoint=folder, draft=given["draft"], **launched)
    if given["compiled"]:
        read_switches()  # a mistake in them is told here, not by a compile that fails
    check_device(given["device"])
    how = given["dtype"], given["resident"], given["compiled"], given["device"]
    return Asked(folder, serving, server, *how, pick(WatchConfig, given))


def folder_of(checkpoint: Path | None, model: Path | None) -> Path:
    """The checkpoint, whichever way it was given. Raises ValueError for two, and for what is none."""
    if checkpoint is not None and model is not None and checkpoint != model:
        raise ValueError(f"two checkpoints are given, {checkpoint} and --model {model}: give one of them")
    folder = or_shipped(checkpoint or model)
    check_checkpoint(folder)
    return folder


def serve_alone(asked: Asked) -> None:
    """Serve in this one process, and compile behind."""
    listener = open_door(asked)
    files = asked.checkpoint, asked.serving.engine, asked.dtype, asked.resident, asked.serving.draft
    loaded = load(*files, device=asked.device)
    if asked.compiled:
        compile_behind(loaded, asked.serving.options)
    ended = answer(asked, loaded.engine, loaded.tokenizer, listener)
    if asked.compiled or not ended:
        leave()


def compile_behind(loaded: Loaded, options: CompileOptions) -> None:
    """Compile on a thread; the engine uses the result from the first step after it is ready."""

    def work() -> None:
        from ..forward import CompiledForward, compile_in_background  # takes seconds, so not before we serve

        def ready(forward: CompiledForward) -> None:
            loaded.engine.use(forward)
            log.info("serving compiled from now on: %d graphs in %.1f s", forward.graphs(), forward.seconds)

        def failed(error: Exception) -> None:
            log.error("serving uncompiled: %s", error)

        engine = loaded.engine
        most = engine.config.max_num_seqs
        compile_in_background(loaded.model, loaded.pools, options, ready, failed, most).join()

    log.info("serving uncompiled; compiling behind it, which takes minutes when nothing is cached")
    threading.Thread(target=work, name="k3-compile-start", daemon=True).start()


def chosen(features: str) -> str | tuple[str, ...]:
    names = tuple(name.strip() for name in features.split(",") if name.strip())
    return names[0] if len(names) == 1 else names


def read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read the API key: {error}") from None

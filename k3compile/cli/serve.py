"""`k3 serve [DIR]`: an OpenAI-compatible server for one checkpoint, the trained tiny one when none is named.

It answers as soon as the weights are loaded, with the model as it is written; compilation goes on behind,
and the engine changes over between two steps.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .. import __version__
from ..options import CompileOptions, read_switches
from ..runtime.engine_config import EngineConfig
from ..runtime.server.server_config import ServerConfig
from ..serving import SET_BY_FEATURES, plan
from .flags import pick, with_flags
from .loading import DTYPES, Loaded, check_checkpoint, drafts_of, load, log_to_stderr, or_shipped

log = logging.getLogger(__name__)


def serve_checkpoint(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Folder with config.json, tiktoken.model and weights; default: the tiny one."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of activations and caches: {', '.join(DTYPES)}.")] = "float32",
    resident: Annotated[str | None, typer.Option(help="Of the weights in memory; default: dtype.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name for clients; default: the folder's.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile while serving.")] = True,
    features: Annotated[str, typer.Option(help="default, all, baseline, plain, or names.")] = "default",
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep what prompts have in common.")
    ] = True,
    num_drafts: Annotated[
        int | None, typer.Option(help="Of a request in a step, 0 to 16; default: 0, with the tiny one 7.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of a DSpark draft; default: draft/ in the checkpoint.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error.")] = "info",
    **flags: Any,
) -> int:
    """Serve a checkpoint over HTTP with OpenAI's API until SIGINT or SIGTERM."""
    log_to_stderr(log_level)
    checkpoint = or_shipped(checkpoint)
    check_checkpoint(checkpoint)
    if api_key_file is not None:
        flags["api_key"] = read_key(api_key_file)
    name = model_name or checkpoint.resolve().name
    server = pick(ServerConfig, {**flags, "model_name": name})
    options = pick(CompileOptions, {**flags, "features": chosen(features)})
    capable = {"prefix_cache": prefix_cache, "num_drafts": drafts_of(num_drafts, checkpoint)}
    engine_config = pick(EngineConfig, {**flags, **capable})
    serving = plan(engine_config, options, checkpoint=checkpoint, draft=draft, compiled=compiled)
    if compiled:
        read_switches()  # a mistake in them is told here, not by a compile that fails

    from ..runtime.server.app import build_app
    from ..runtime.server.run import bind, serve, url_of

    if server.api_key is None and not server.is_loopback:
        log.warning("listening on %s without an API key: whoever reaches it may use it", server.host)
    listener = bind(server)
    for line in serving.lines():
        log.info("%s", line)
    for line in serving.warnings:
        log.warning("%s", line)
    loaded = load(checkpoint, serving.engine, dtype, resident, serving.draft)
    app = build_app(loaded.engine, loaded.tokenizer, server, __version__)

    def announce() -> None:
        print(f"k3compile {__version__} serves {name!r} at {url_of(listener)} (Ctrl-C ends it)", flush=True)

    if compiled:
        compile_behind(loaded, serving.options)
    ended = serve(app, loaded.engine, listener, server, announce)
    if compiled or not ended:
        leave()
    return 0


serve = with_flags(
    serve_checkpoint,
    (EngineConfig, (*SET_BY_FEATURES, "prefix_cache", "num_drafts")),
    (ServerConfig, ("model_name",)),
    (CompileOptions, ()),
)
serve.__name__ = "serve"


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


def leave() -> NoReturn:
    """End the process here: a thread may be deep in a step or a compiler, which nothing can stop, and the
    interpreter's own way out waits seconds for the compiler's workers. They end when we do.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def chosen(features: str) -> str | tuple[str, ...]:
    names = tuple(name.strip() for name in features.split(",") if name.strip())
    return names[0] if len(names) == 1 else names


def read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read the API key: {error}") from None

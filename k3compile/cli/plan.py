"""`k3 plan --model CONFIG --tp N --gpu NAME`: whether it fits, and what then fits beside it, from the config.

fits          exit code 0     bytes by kind, pools, requests by length, budgets, the command that serves
does not      exit code 1     why, and the smallest change of each setting that would make it fit
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..features import expand
from ..runtime.engine_config import EngineConfig
from ..serving import DRAFT_FOLDER, SET_BY_FEATURES
from .flags import pick, with_flags
from .loading import check_dtype

OURS = ("prefix_cache", "num_drafts", "max_num_seqs", "max_num_batched_tokens")  # with defaults of our own
IRRELEVANT = (  # to sizes
    "poison", "max_waiting", "long_prefill_tokens", "draft_sampling", "verification", "adaptive_verification",
    "offload_host_bytes", "offload_dir", "offload_disk_bytes",
)  # fmt: skip
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LARGE_MEMORY = 160 << 30  # from which a step of 16,384 rows is the usual one
REQUESTS = 64


def plan_model(
    model: Annotated[str, typer.Option(help="kimi-k3, kimi-linear, a config.json or a checkpoint folder.")],
    gpu: Annotated[str, typer.Option(help="b300, b200, h200 or mi355x.")],
    tp: Annotated[int, typer.Option(help="Ranks that share every layer, one a GPU.")] = 8,
    dcp: Annotated[int, typer.Option(help="Ranks over which a token's latents are dealt out.")] = 1,
    draft: Annotated[str | None, typer.Option(help="Folder of a DSpark draft, or: released.")] = None,
    num_drafts: Annotated[
        int | None, typer.Option(help="Of a request in a step; default: the draft's block, or none.")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache")] = True,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = REQUESTS,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Rows of a step; default: 16384, below 160 GiB of memory 8192.")
    ] = None,
    usable: Annotated[float, typer.Option(help="Share of the memory to plan with.")] = 0.92,
    reserve: Annotated[
        str | None, typer.Option(help="Besides weights and pools, such as 8GB; default: estimated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of activations, caches and matrices.")] = "bfloat16",
    features: Annotated[str, typer.Option(help="default, all, baseline, plain, or names.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> int:
    """Say from a configuration alone whether it fits some GPUs; exit code 1 and what would fit, if not."""
    check_dtype("dtype", dtype)
    kept = None if reserve is None else bytes_of(reserve)

    from ..planning.change import smallest_changes
    from ..planning.gpus import gpu_named
    from ..planning.plan import Question, make_plan
    from ..planning.released import DRAFT, read_draft, read_model
    from ..planning.render import WIDTH, show
    from ..planning.report import as_values

    config, on = read_model(model), gpu_named(gpu)
    named = draft or (own_draft(model) if num_drafts else None)
    drafting = read_draft(named, config) if named else None
    if num_drafts is None:
        num_drafts = drafting.block_size if drafting else 0
    rows = max_num_batched_tokens or (16384 if on.memory >= LARGE_MEMORY else 8192)
    names = expand([name.strip() for name in features.split(",") if name.strip()])
    capable = {"prefix_cache": prefix_cache, "num_drafts": num_drafts}
    capable |= {name: name in names for name in SET_BY_FEATURES}
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": rows}
    engine = pick(EngineConfig, {**flags, **capable, **sizes})
    answer = make_plan(Question(config, on, tp, engine, dcp, drafting, usable, kept, dtype))
    given = {"model": model if Path(model).is_dir() else "DIR"}
    given |= {"draft": "DRAFT" if draft == DRAFT else draft} if draft else {}
    given |= {"features": features} if features != "default" else {}
    values = as_values(answer, [] if answer.fits else smallest_changes(answer), model, given)
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
        show(console, values)
    return 0 if answer.fits else 1


plan = with_flags(plan_model, (EngineConfig, (*OURS, *SET_BY_FEATURES, *IRRELEVANT)))
plan.__name__ = "plan"


def own_draft(model: str) -> str | None:
    """The draft that a checkpoint folder brings along, which its server would use."""
    found = Path(model) / DRAFT_FOLDER
    return str(found) if (found / "config.json").is_file() else None


def bytes_of(text: str) -> int:
    """8000000000, 8GB or 7.5GiB in bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"reserve is {text!r}; expected bytes such as 8000000000, 8GB or 7.5GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])

"""`k3 doctor`: what this machine has of what k3compile needs, and what to do about the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table


class Finding(NamedTuple):
    """ok: None means "nothing to worry about, but good to know"."""

    what: str
    ok: bool | None
    found: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Check versions, entry point, C++ compiler, headers, cache, memory; exit code 1 if one fails."""
    findings = [check() for check in CHECKS]
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        table = Table("", "what", "found", "advice", box=None)
        for what, ok, found, advice in findings:
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[dim]--[/]"}[ok]
            table.add_row(mark, what, found, "" if ok else advice)
        Console().print(table)
    return 1 if any(finding.ok is False for finding in findings) else 0


def python() -> Finding:
    found = platform.python_version()
    return Finding("python", sys.version_info >= (3, 11), found, "k3compile needs Python 3.11 or newer")


def torch_version() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", False, str(error), "install torch 2.13: pip install -c constraints.txt -e .")
    found = f"{torch.__version__}, {torch.get_num_threads()} threads"
    return Finding(
        "torch", torch.__version__.startswith("2.13."), found, "install torch 2.13, whose internals we read"
    )


def entry_point() -> Finding:
    found = [e for e in metadata.entry_points(group="torch_dynamo_backends") if e.name == "k3"]
    advice = "reinstall: pip install -e . (the entry point is written at install time)"
    what = 'torch.compile(backend="k3")'
    if not found:
        return Finding(what, False, "not registered", advice)
    try:
        found[0].load()
    except (ImportError, AttributeError) as error:
        return Finding(what, False, str(error), advice)
    return Finding(what, True, found[0].value)


def package() -> Finding:
    from .. import __version__

    try:
        installed = metadata.version("k3compile")
    except metadata.PackageNotFoundError:
        return Finding("k3compile", False, "not installed", "pip install -e .")
    return Finding(
        "k3compile", installed == __version__, installed, f"reinstall: these are the sources of {__version__}"
    )


def libraries() -> Finding:
    names = ("safetensors", "tiktoken", "fastapi", "uvicorn", "pydantic", "prometheus-client")
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    return Finding("libraries", not missing, ", ".join(found), f"missing: {', '.join(missing)}")


def compiler() -> Finding:
    advice = "install a C++ compiler (Debian: apt install g++); without one nothing is compiled by Inductor"
    path = shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return Finding("C++ compiler", False, "none", advice)
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Finding("C++ compiler", shown.returncode == 0, (shown.stdout.splitlines() or [path])[0], advice)


def headers() -> Finding:
    folder = Path(sysconfig.get_path("include"))
    advice = "install Python's headers (Debian: apt install python3-dev); Inductor's C++ includes Python.h"
    return Finding("Python headers", (folder / "Python.h").is_file(), str(folder), advice)


def cache() -> Finding:
    try:
        from ..torch_private import cache_folder
    except ImportError as error:
        return Finding("compile cache", False, str(error), "see torch above")
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    found = f"{folder} ({free / 1e9:.1f} GB free)"
    return Finding(
        "compile cache", writable and free > 1e9, found, "set TORCHINDUCTOR_CACHE_DIR to a roomier place"
    )


def memory() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding("memory", None, f"{pages * size / 1e9:.1f} GB, {os.cpu_count()} CPUs")


def gpu() -> Finding:
    try:
        import torch
    except (ImportError, OSError):
        return Finding("GPU", None, "unknown")
    if not torch.cuda.is_available():
        return Finding("GPU", None, "none; the CPU serves")
    return Finding("GPU", None, torch.cuda.get_device_name())


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, torch_version, package, entry_point, libraries, compiler, headers, cache, memory, gpu,
)  # fmt: skip

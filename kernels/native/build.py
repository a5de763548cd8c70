"""From a C++ source in ``kernels/cpu`` to a loaded shared library, compiled once for a source and a CPU.

    moe.cpp, *.h --digest with flags and compiler--> <cache>/k3-native/moe-avx512-<digest>.so --> ctypes

The sources include nothing of torch, so a compile takes a second or two; torch's cache folder and its choice
of a compiler are used. Threads come from the OpenMP runtime that torch has loaded (cpu/threads.h). Processes
that build the same file wait for one of them; a file appears under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent.parent / "cpu"
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
ISAS = {  # instruction set -> flags, spelled out so that a shared cache folder may serve any CPU
    "avx512_vnni": (*AVX512, "-mavx512vnni", "-mavx512vbmi"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
)
COMPILE_SECONDS = 120  # a compile that takes longer is given up
_LOADED: dict[tuple[str, str], ctypes.CDLL | str] = {}


class CannotBuild(RuntimeError):
    """There is no library: no compiler, or it failed."""


@functools.cache
def best_isa() -> str:
    """What torch itself runs on this CPU: ``avx512``, with or without products of bytes (``avx512_vnni``),
    ``avx2`` or ``portable``.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()
    if capability == "avx512":
        has = torch.cpu.get_capabilities()
        return "avx512_vnni" if has.get("avx512_vnni") and has.get("avx512_vbmi") else "avx512"
    return capability if capability in ISAS else "portable"


def unavailable(name: str, isa: str | None = None) -> str | None:
    """Why the library ``name`` cannot be had, or None; builds it, so the first answer may take seconds."""
    try:
        library(name, isa)
    except CannotBuild as error:
        return str(error)
    return None


@functools.cache
def warn_once(said: str) -> None:
    """Once in a process: compiled code wants a kernel that this machine cannot build."""
    warnings.warn(f"{said}; the reference computes it, slowly", RuntimeWarning, stacklevel=3)


def left_to_meaning(name: str) -> bool:
    """Whether the meaning has to compute a call after all, which warns once: the call was chosen where there
    was a compiler, and its code was then read from a cache folder by a machine that has none.
    """
    if reason := unavailable(name):
        warn_once(reason)
    return reason is not None


def library(name: str, isa: str | None = None) -> ctypes.CDLL:
    """The loaded library of ``kernels/cpu/<name>.cpp`` for ``isa`` (default: the best of this CPU).

    A failure is remembered for the process. Raises CannotBuild saying why, ValueError for an unknown isa.
    """
    isa = isa or best_isa()
    if isa not in ISAS:
        raise ValueError(f"unknown instruction set {isa!r}; known: {', '.join(ISAS)}")
    if (name, isa) not in _LOADED:
        try:
            _LOADED[name, isa] = ctypes.CDLL(str(built(name, isa, cache_folder())))
        except (CannotBuild, OSError) as error:
            _LOADED[name, isa] = f"no native {name} kernel: {error}"
    found = _LOADED[name, isa]
    if isinstance(found, str):
        raise CannotBuild(found)
    return found


def cache_folder() -> Path:
    """Where libraries are kept: beside what Inductor compiles."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "k3-native"


def compilers() -> list[str]:
    """Compilers to try: torch's own choice (which knows CXX), then the usual names."""
    import torch._inductor.config as inductor

    named = inductor.cpp.cxx
    return [c for c in (*(named if isinstance(named, (tuple, list)) else [named]), "c++", "clang++") if c]


def find_compiler() -> str:
    """Path of the first compiler there is. Raises CannotBuild."""
    names = compilers()
    for name in names:
        if path := shutil.which(name):
            return path
    raise CannotBuild(f"no C++ compiler ({', '.join(names)}); install one, or set CXX")


def built(name: str, isa: str, folder: Path) -> Path:
    """The library file in ``folder``, compiled if it is not there. Raises CannotBuild, OSError."""
    compiler = find_compiler()
    target = folder / f"{name}-{isa}-{digest(name, isa, compiler)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            compile_to(target, name, isa, compiler)
    return target


def digest(name: str, isa: str, compiler: str) -> str:
    """16 hexadecimal digits of everything the machine code depends on."""
    total = hashlib.sha256(" ".join([name, os.uname().machine, compiler, *FLAGS, *ISAS[isa]]).encode())
    total.update(run([compiler, "--version"]).encode())
    for source in [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]:
        total.update(source.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def compile_to(target: Path, name: str, isa: str, compiler: str) -> None:
    """Compile beside ``target`` and move it there in one step."""
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        run([compiler, *FLAGS, *ISAS[isa], str(SOURCES / f"{name}.cpp"), "-o", str(part)])
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def run(command: list[str]) -> str:
    """What the command prints. Raises CannotBuild with the end of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {COMPILE_SECONDS} s") from error
    if done.returncode:
        raise CannotBuild(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; where the file system knows no locks, several processes build and the last wins."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

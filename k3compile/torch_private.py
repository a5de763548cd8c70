"""Every private torch name the front door touches, in one place, with the version it was read in.

Private names move. When torch is raised, this file and its test say what to re-read; nothing else in the
front door reaches under torch's surface.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode

_probes: list[threading.Thread] = []
_replaced = threading.RLock()
READ_IN = (2, 13)  # the torch version these names and their meaning were checked in

__all__ = [
    "READ_IN",
    "CustomInferenceAwareGraphPass",
    "InductorError",
    "RestartAnalysis",
    "aot_autograd",
    "ask_processor",
    "await_probe",
    "bisecting",
    "bisector_veto",
    "c_function",
    "cache_folder",
    "clone_dynamo_graph",
    "clone_graph",
    "compile_with_inductor",
    "decompositions_of_inductor",
    "delete_torn_library",
    "fake_mode_of",
    "fake_of",
    "fix_sizes",
    "fresh_tracing",
    "function_compiled",
    "generated_code",
    "guards_of",
    "instead_of_generated_code",
    "min_cut_partition",
    "on_real_tensors",
    "probe_processor",
    "registered_backend",
    "scalars_allowed",
    "size_hints",
    "symbolic_sizes",
    "tracing_with",
    "version_objection",
]


def version_objection() -> str | None:
    """Why this torch cannot be trusted with our passes, or None."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version == READ_IN:
        return None
    return f"torch {torch.__version__} is not the {READ_IN[0]}.{READ_IN[1]} k3compile was checked with"


def clone_dynamo_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be rewritten. It shares parameters and values with ``gm``.

    ``copy.deepcopy`` drops the sources of parameters and placeholders, and without them AOTAutograd takes
    every parameter for an ordinary input. Dynamo reads its own graph again after the backend returned, so
    the original must stay as it is.
    """
    clone = fx.GraphModule(gm, clone_graph(gm.graph))
    for name, value in gm.__dict__.items():
        if name not in clone.__dict__:
            clone.__dict__[name] = value
    clone.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        clone._param_name_to_source = dict(gm._param_name_to_source)
    return clone


def clone_graph(graph: fx.Graph) -> fx.Graph:
    """``copy.deepcopy(graph)`` that keeps the ``_dynamo_source`` of placeholders."""
    clone = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, clone.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return clone


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the compile in progress."""
    return detect_fake_mode(values)


def fresh_tracing(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """A compile within the compile, on the same fake mode, that leaves the outer one's notes alone."""
    return tracing_with(detect_fake_mode(values))


def function_compiled() -> object:
    """What tells the function that Dynamo compiles from others, the same when it compiles it once more.

    Outside of a compile it is equal to nothing.
    """
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return object() if compile_id is None else compile_id.frame_id


def size_hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """The sizes of the example the graph was traced with; no guard is made."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return [size if isinstance(size, int) else optimization_hint(size) for size in sizes]


@contextmanager
def scalars_allowed(mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, a graph on this mode's sizes may read numbers out of tensors, although Dynamo's own may not.

    Without ``fullgraph=True`` Dynamo breaks its graph at ``item`` and forbids it to everything after. The
    other fake modes of the compile share the sizes, and so the permission.
    """
    env = mode.shape_env if mode is not None else None
    if env is None:
        yield
        return
    kept = env.settings
    env.settings = replace(kept, allow_scalar_outputs=True)
    try:
        yield
    finally:
        env.settings = kept


def on_real_tensors() -> AbstractContextManager[Any]:
    """Where tensors are computed with, although a compile is tracing around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def tracing_with(mode: FakeTensorMode | None) -> AbstractContextManager[Any]:
    """A compile outside Dynamo that takes the inputs to be what ``mode`` made of them."""
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(mode))


def symbolic_sizes(symbols: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A fake mode with a symbol for each name, backed by its number unless the name is ``u...``."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env, made = ShapeEnv(), {}
    with env.ignore_fresh_unbacked_symbols():
        for name, number in symbols.items():
            if name.startswith("u"):
                made[name] = env.create_unbacked_symint()
                torch._check(made[name] >= 0)
            else:
                source = ConstantSource(name)
                made[name] = env.create_unspecified_symint_and_symbol(number, source, DimDynamic.DYNAMIC)
    return FakeTensorMode(shape_env=env), made


def fake_of(mode: FakeTensorMode, real: torch.Tensor, sizes: list[Any], strides: list[Any]) -> torch.Tensor:
    """The fake of ``real`` with these sizes, which AOTAutograd will take for it too."""
    with mode:
        fake = torch.empty_strided(sizes, strides, dtype=real.dtype, device=real.device)
    mode.fake_tensor_converter.set_tensor_memo(real, fake)
    return fake


def fix_sizes(added: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
    """Have AOTAutograd take ``added``, inputs that Dynamo does not know, with the sizes they have.

    It does so as long as somebody holds what is returned. It would name a symbol for each size else, after
    how many tensors it has met: a warm cache changes that number, and then does not find the graph.
    """
    mode = detect_fake_mode(inputs)
    return [] if mode is None else [mode.from_tensor(one, static_shapes=True) for one in added]


def probe_processor() -> None:
    """Begin what Inductor does once a process, cached or not, on a thread of its own: :func:`learn`.

    It takes a second or more of the first compile. Done while Dynamo traces, it is there when it is needed.
    """
    import torch._inductor.compile_fx  # noqa: F401  here, since Dynamo may trace while the thread runs

    if not _probes:
        _probes.append(threading.Thread(target=learn, name="k3-probe", daemon=True))
        _probes[0].start()


def learn() -> None:
    """Which vector instructions compile and load here, and the digest of torch's sources for cache keys."""
    from torch._inductor.codecache import torch_key

    torch_key()  # kept by torch; reading and hashing let the other threads run
    ask_processor()


def ask_processor() -> list[str]:
    """Names of the vector instructions Inductor may use; an earlier start's answers save its subprocesses.

    They are kept beside the compile cache, for this torch, compiler and processor. Only a yes is believed.
    """
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compiler, flags = get_compiler_version_info(get_cpp_compiler()), cpu_vec_isa.x86_isa_checker()
    machine = digest_of_words(torch.__version__, compiler, *sorted(flags))
    file = cache_folder() / "processor"
    try:
        whose, *kept = file.read_text().split("\n")
    except OSError:
        whose, kept = "", []
    known = dict.fromkeys(kept if whose == machine else [])
    for isa in cpu_vec_isa.supported_vec_isa_list:
        isa.check_build = partial(answered, isa, isa.check_build, known)
    found = [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()]
    if (whose, kept) != (machine, list(known)):
        with suppress(OSError):  # a folder that cannot be written costs the next start a second
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join([machine, *known]))
    return found


def answered(isa: Any, ask: Callable[[str], bool], known: dict[str, None], code: str) -> bool:
    """Whether ``code`` compiles and loads with these instructions; a yes is noted in ``known``."""
    question = digest_of_words(str(isa), isa.build_arch_flags(), code)
    if question not in known and not ask(code):
        return False
    known[question] = None
    return True


def digest_of_words(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def await_probe() -> None:
    """Wait for the answer; ask now, if nobody did."""
    probe_processor()
    _probes[0].join()


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable:
    """Inductor's whole pipeline (AOTAutograd, its caches, the partitioner) with config ``patches``."""
    from torch._inductor.compile_fx import compile_fx

    await_probe()
    return compile_fx(gm, inputs, config_patches=patches)


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """Inside, the Python that Inductor generates, or finds in its cache, is collected in the list."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    kept = GraphLowering.save_output_code

    def save(code: str) -> None:
        found.append(code)
        if kept is not None:
            kept(code)

    GraphLowering.save_output_code = save
    try:
        yield found
    finally:
        GraphLowering.save_output_code = kept


@contextmanager
def instead_of_generated_code(run: Callable[[Callable[..., Any], list[Any]], Any]) -> Iterator[None]:
    """Inside, on this thread, ``run(code, args)`` is called wherever a compiled graph would run the Python
    that Inductor generated, ``code(args)``. Others wait to do the same, and run theirs meanwhile.
    """
    from torch._inductor.output_code import CompiledFxGraph

    me = threading.get_ident()

    def call(self: CompiledFxGraph, inputs: list[Any]) -> Any:
        if threading.get_ident() != me:
            return kept(self, inputs)
        return run(self.current_callable, inputs)

    with _replaced:
        kept = CompiledFxGraph.__call__
        CompiledFxGraph.__call__ = call
        try:
            yield
        finally:
            CompiledFxGraph.__call__ = kept


def c_function(kernel: Callable[..., Any]) -> int | None:
    """Address of the C function behind a kernel that Inductor generated for a CPU: a module of one function,
    which has its name and takes the same arguments, tensors as pointers. None for any other callable.
    """
    file = getattr(getattr(kernel, "__self__", None), "__file__", None)
    if not isinstance(kernel, BuiltinFunctionType) or file is None:
        return None
    found = getattr(ctypes.CDLL(file), kernel.__name__, None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    """How ``aot_eager`` of torch splits a training graph."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def registered_backend(name: str) -> Callable[..., Any]:
    """A Dynamo backend by name. Raises torch._dynamo.exc.InvalidBackend for an unknown one."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def bisector_veto(pass_name: str) -> bool:
    """Whether torch's compiler bisector forbids the next rewrite; it finds the guilty one of ours by name."""
    from torch._inductor.compiler_bisector import BACKENDS, BisectSubsystem, CompilerBisector

    BACKENDS.setdefault("k3", [BisectSubsystem("k3_passes")])
    return CompilerBisector.disable_subsystem("k3", "k3_passes", lambda: pass_name)


def bisecting() -> bool:
    """Whether the bisector is at work, so that no cache may answer."""
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.bisection_enabled


def guards_of(fake_mode: FakeTensorMode | None) -> list[str]:
    """The guards on sizes so far, as text."""
    env = fake_mode.shape_env if fake_mode is not None else None
    return [str(guard.expr) for guard in env.guards] if env is not None else []


def decompositions_of_inductor() -> dict[Any, Callable[..., Any]]:
    """The table Inductor lowers with; ops opened after AOTAutograd must be decomposed by the same one."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def cache_folder() -> Path:
    """Our corner of Inductor's cache folder; it is removed with the artifacts it describes."""
    return Path(cache_dir()) / "k3"


def delete_torn_library(error: InductorError) -> str | None:
    """Delete the library that ``error`` could not load; its name, or None for any other error.

    Inductor lets the C++ compiler write into its cache, so a compile that is killed leaves half a file, which
    every later start would fail on.
    """
    found = re.search(r"(?:ImportError|OSError): (/[^:]*\.so): ", str(error))
    library = Path(found[1]) if found else None
    if library is None or not library.is_relative_to(cache_dir()) or not library.exists():
        return None
    library.unlink()
    return library.name

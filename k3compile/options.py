"""What a user may say to the backend, checked once; and the three K3_* switches, read here and nowhere else.

    torch.compile(model, backend="k3", options={"inner": "aot_eager", "require": {"contiguous_views": 8}})
    K3_DUMP=dir  K3_DISABLE=contiguous_views,latent_tail  K3_FUEL=17

A typo that is silently ignored is an optimisation silently lost, so every unknown name is an error with the
nearest known one, and all errors come in one message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .features import FEATURES, expand, nearest

INNERS = ("inductor", "aot_eager", "eager")
LEVELS = ("off", "static", "differential")
Lower = Literal["auto"] | Mapping[str, str]
Verify = Literal["off", "static", "differential"]


@dataclass(frozen=True)
class CompileOptions:
    """One compile, as the user wants it.

    features: a reference point (``default``, ``all``, ``baseline``, ``plain``), a feature, or a tuple.
    inner: what makes the callable: ``inductor``, ``aot_eager`` (generated Python), ``eager`` (node by node,
    errors name the model's line), or another registered Dynamo backend, which gets the islands of the graph
    (``islands:inductor`` and so on for the first three). lower: ``auto``, or {op: provider}, which is obeyed
    or the compile raises; providers are ``meaning``, ``open`` and the op's implementations. verify: ``off``,
    ``static``. on_error: what a failing pass or island does, ``raise`` or ``fallback`` to the graph before
    it. require: {pass: applied sites}, for each graph that has sites of that pass, or the compile raises.
    disable: passes not to run. range_source: how an index may be known to be a range; ``check`` is
    ``prove+annotate`` with every annotated index compared with its values at each call (slow: it waits for
    the device). report: file that receives the reports as well. inductor: Inductor's own options. replay:
    whether a compiled model runs steps of few rows on a CPU as recorded calls (replay.py).
    """

    features: str | tuple[str, ...] = "default"
    inner: str = "inductor"
    lower: Lower = "auto"
    verify: Verify | Mapping[str, Verify] = "off"
    on_error: Literal["raise", "fallback"] = "raise"
    require: Mapping[str, int] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    range_source: Literal["prove", "prove+annotate", "check"] = "prove+annotate"
    report: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    replay: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.features, list):
            object.__setattr__(self, "features", tuple(self.features))
        if isinstance(self.disable, (str, list)):
            names = [self.disable] if isinstance(self.disable, str) else self.disable
            object.__setattr__(self, "disable", tuple(names))
        if wrong := [w for w in (check(self) for check in CHECKS) if w]:
            raise ValueError("bad k3 compile options:\n  " + "\n  ".join(wrong))

    @property
    def plain(self) -> bool:
        """Whether the request is the plain point: no optimisation, every op opened."""
        names = (self.features,) if isinstance(self.features, str) else self.features
        return "plain" in names

    def canonical(self) -> dict[str, Any]:
        """What changes the compiled code, as plain data; Inductor keys its own options itself."""
        data = {k: v for k, v in asdict(self).items() if k not in ("report", "inductor", "replay")}
        return data | {"features": sorted(expand(self.features)), "plain": self.plain}


@dataclass(frozen=True)
class Switches:
    """The environment's word: dump folder, passes to disable, number of rewrites allowed."""

    dump: Path | None = None
    disable: tuple[str, ...] = ()
    fuel: int | None = None


def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> CompileOptions:
    """The options of ``torch.compile(options=..., mode=...)``; the mapping is copied before it is read.

    mode: one of torch's own modes, which become Inductor options. Raises ValueError for unknown keys or modes
    (nearest name given) and for bad values, all of them in one message.
    """
    given = dict(options or {})
    known = [f.name for f in fields(CompileOptions)]
    if unknown := [k for k in given if k not in known]:
        near = ", ".join(f"{k!r}{nearest(k, known)}" for k in unknown)
        raise ValueError(f"unknown k3 compile option {near}; known: {', '.join(known)}")
    if mode is not None:
        given["inductor"] = options_of_mode(mode) | dict(given.get("inductor", {}))
    return CompileOptions(**given)


def options_of_mode(mode: str) -> dict[str, Any]:
    """Inductor's options for one of torch's mode names. Raises ValueError for any other string."""
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}{nearest(mode, modes)}; known: {', '.join(modes)}")
    return dict(modes[mode])


def read_switches(environ: Mapping[str, str] | None = None) -> Switches:
    """K3_DUMP, K3_DISABLE and K3_FUEL. Raises ValueError naming the variable and what it may hold."""
    environ = os.environ if environ is None else environ
    dump, fuel = environ.get("K3_DUMP"), environ.get("K3_FUEL", "").strip()
    names = tuple(n.strip() for n in environ.get("K3_DISABLE", "").split(",") if n.strip())
    if wrong := unknown_names(names, pass_names()):
        raise ValueError(f"K3_DISABLE names no pass: {wrong}; passes: {', '.join(pass_names())}")
    if fuel and not fuel.isdigit():
        raise ValueError(f"K3_FUEL is {fuel!r}; it is a number of rewrites, 0 or more")
    return Switches(Path(dump) if dump else None, names, int(fuel) if fuel else None)


def pass_names() -> list[str]:
    """Every name that can be disabled or required: the passes, and the features that passes implement."""
    from .passes.pipeline import ATEN_PASSES, DYNAMO_PASSES

    built = [p.name for p in (*DYNAMO_PASSES, *ATEN_PASSES)]
    return [*built, *(n for n, f in FEATURES.items() if f.by == "pass" and n not in built)]


def unknown_names(names: Iterable[str], known: Iterable[str]) -> str:
    """The names that are not known, each with its nearest; empty when all are."""
    known = list(known)
    return ", ".join(f"{n!r}{nearest(n, known)}" for n in names if n not in known)


def one_of(name: str, *allowed: str) -> Callable[[CompileOptions], str | None]:
    def check(options: CompileOptions) -> str | None:
        value = getattr(options, name)
        if isinstance(value, str) and value in allowed:
            return None
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        return f"{name} is {value!r}{hint}; allowed: {', '.join(allowed)}"

    return check


def check_features(options: CompileOptions) -> str | None:
    try:
        expand(options.features)
    except (ValueError, TypeError) as error:
        return f"features: {error}"
    return None


def check_inner(options: CompileOptions) -> str | None:
    if options.inner in INNERS:
        return None
    if not isinstance(options.inner, str):
        return one_of("inner", *INNERS)(options)
    from torch._dynamo import list_backends

    from .islands import PREFIX, REGISTERED_BY, absent

    name = options.inner.removeprefix(PREFIX)
    if name in REGISTERED_BY:
        return absent(options.inner)
    if name != "k3" and name in list_backends(exclude_tags=()):
        return None
    shown = [n for n in (*INNERS, *list_backends()) if n != "k3"]  # those meant for users
    return one_of("inner", *dict.fromkeys(shown))(options)


def check_lower(options: CompileOptions) -> str | None:
    if options.lower == "auto":
        return None
    if not isinstance(options.lower, Mapping):
        return f"lower is {options.lower!r}; allowed: 'auto' or a mapping of op names to providers"
    from . import kernels  # noqa: F401  (declares the ops)
    from .kernels.op import OPS

    if wrong := unknown_names(options.lower, OPS):
        return f"lower names no op: {wrong}; ops: {', '.join(OPS)}"
    bad = [
        f"{op} has no provider {p!r}{nearest(p, providers)} (it has {', '.join(providers)})"
        for op, p in options.lower.items()
        if p not in (providers := ["meaning", "open", *OPS[op].implementations])
    ]
    return f"lower: {'; '.join(bad)}" if bad else None


def check_names(options: CompileOptions) -> str | None:
    known = pass_names()
    wrong = unknown_names((*options.disable, *options.require), known)
    if wrong:
        return f"disable and require name passes; unknown: {wrong}; passes: {', '.join(known)}"
    counts = {k: v for k, v in options.require.items() if not isinstance(v, int) or v < 1}
    return f"require wants at least 1 applied site for a pass, got {counts}" if counts else None


def check_replay(options: CompileOptions) -> str | None:
    if isinstance(options.replay, bool):
        return None
    return f"replay is {options.replay!r}; allowed: True, False"


def check_verify(options: CompileOptions) -> str | None:
    """One level for all passes, or {pass: level}; ``lower`` counts as a pass here."""
    if not isinstance(options.verify, Mapping):
        said = one_of("verify", *LEVELS)(options)
        return said and f"{said}, or a mapping of passes to these"
    known = [*pass_names(), "lower"]
    if wrong := unknown_names(options.verify, known):
        return f"verify names no pass: {wrong}; passes: {', '.join(known)}"
    bad = [
        f"{name} is {level!r}{nearest(level, LEVELS) if isinstance(level, str) else ''}"
        for name, level in options.verify.items()
        if level not in LEVELS
    ]
    return f"verify: {'; '.join(bad)}; allowed: {', '.join(LEVELS)}" if bad else None


def check_inductor(options: CompileOptions) -> str | None:
    if not isinstance(options.inductor, Mapping):
        return f"inductor is {options.inductor!r}; allowed: a mapping of Inductor's own options"
    if not options.inductor:
        return None
    from torch._inductor import list_options

    known = list_options()
    wrong = unknown_names((k.replace("-", "_") for k in options.inductor), known)
    return f"inductor has no option {wrong}" if wrong else None


CHECKS = (
    check_features,
    check_inner,
    check_lower,
    check_verify,
    one_of("on_error", "raise", "fallback"),
    check_names,
    one_of("range_source", "prove", "prove+annotate", "check"),
    check_inductor,
    check_replay,
)

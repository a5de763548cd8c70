"""k3compile: computes the fast Kimi K3 from the plain one, and serves it.

Names are looked up when they are first used (PEP 562), so that ``import k3compile`` costs nothing and the
``torch.compile`` entry point can live in this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adoption.layers import adopt, unadopt
    from .annotations import annotate_range
    from .export import Checkpoints, checkpoints, export_at
    from .graph_capture import capture
    from .llm import LLM
    from .opened_ops import open_ops
    from .options import CompileOptions
    from .runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
LAZY = {
    "Checkpoints": ".export",
    "CompileOptions": ".options",
    "LLM": ".llm",
    "SamplingParams": ".runtime.sampling_params",
    "adopt": ".adoption.layers",
    "annotate_range": ".annotations",
    "capture": ".graph_capture",
    "checkpoints": ".export",
    "export_at": ".export",
    "open_ops": ".opened_ops",
    "unadopt": ".adoption.layers",
}
__all__ = [
    "LLM",
    "Checkpoints",
    "CompileOptions",
    "SamplingParams",
    "__version__",
    "adopt",
    "annotate_range",
    "capture",
    "checkpoints",
    "export_at",
    "open_ops",
    "unadopt",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {sorted(__all__)}")
    return getattr(import_module(LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)

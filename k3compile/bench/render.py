"""A benchmark as a table for people and as JSON for programs: the same numbers."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .limits import MachineLimits, Sample
from .model import ModelResult, ModeResult

REFERENCES = ("inductor", "plain")


def as_json(limits: MachineLimits, results: list[ModelResult]) -> dict[str, Any]:
    """Plain numbers: seconds, bytes and FLOPs, medians with quartiles."""
    return {
        "limits": {
            "threads": limits.threads,
            "read_bytes_per_second": limits.bytes_per_second,
            "float32_flops_per_second": limits.flops_per_second,
        },
        "models": [model_json(limits, result) for result in results],
    }


def model_json(limits: MachineLimits, result: ModelResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "layers": result.layers,
        "prompt_tokens": result.prompt,
        "decode_bytes": result.decode_bytes,
        "weights_read_bytes_per_second": result.read_bytes_per_second,
        "prefill_flops": result.prefill_flops,
        "modes": {mode.mode: mode_json(limits, result, mode) for mode in result.modes},
    }


def mode_json(limits: MachineLimits, result: ModelResult, mode: ModeResult) -> dict[str, Any]:
    return {
        "prefill_tokens_per_second": result.prompt / mode.prefill.median,
        "prefill_share_of_limit": result.prefill_flops / mode.prefill.median / limits.flops_per_second,
        "decode_tokens_per_second": 1 / mode.decode.median,
        "decode_share_of_limit": result.decode_bytes / mode.decode.median / limits.bytes_per_second,
        "decode_share_of_weights_read": result.decode_bytes
        / mode.decode.median
        / result.read_bytes_per_second,
        "ttft_seconds": spread(mode.ttft),
        "prefill_seconds": spread(mode.prefill),
        "decode_seconds": spread(mode.decode),
        "host_seconds_per_layer": mode.host_per_layer,
        "peak_bytes": mode.peak_bytes,
        "compile_seconds": mode.compile_seconds,
    }


def spread(sample: Sample) -> dict[str, float]:
    low, high = sample.interval
    return {"median": sample.median, "low": low, "high": high}


def table(limits: MachineLimits, result: ModelResult) -> Table:
    """One model: a row a mode, rates with their share of what the machine can do."""
    made = Table(title=f"{result.name}: {result.layers} layers, prompt {result.prompt}, one request")
    columns = (
        "mode",
        "prefill tok/s",
        "of limit",
        "decode tok/s",
        "of limit",
        "of read",
        "TTFT ms",
        "host µs/layer",
    )
    given = [m for m in result.modes if m.mode in REFERENCES]
    ratios = [f"{what} / {m.mode}" for m in given for what in ("prefill", "decode")]
    for column in (*columns, "peak MB", "compile s", *ratios):
        made.add_column(column, justify="left" if column == "mode" else "right")
    for mode in result.modes:
        made.add_row(*row(limits, result, mode, given))
    return made


def row(
    limits: MachineLimits, result: ModelResult, mode: ModeResult, references: list[ModeResult]
) -> list[str]:
    values = mode_json(limits, result, mode)
    low, high = mode.ttft.interval
    cells = [
        mode.mode,
        f"{values['prefill_tokens_per_second']:.0f}",
        f"{values['prefill_share_of_limit']:.0%}",
        f"{values['decode_tokens_per_second']:.1f}",
        f"{values['decode_share_of_limit']:.0%}",
        f"{values['decode_share_of_weights_read']:.0%}",
        f"{mode.ttft.median * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})",
        f"{mode.host_per_layer * 1e6:.0f}",
        f"{mode.peak_bytes / 1e6:.0f}",
        f"{mode.compile_seconds:.1f}",
    ]
    for reference in references:
        cells.append(f"{reference.prefill.median / mode.prefill.median:.2f}x")
        cells.append(f"{reference.decode.median / mode.decode.median:.2f}x")
    return cells


def heading(limits: MachineLimits) -> str:
    """The ceilings that the shares refer to."""
    return (
        f"limits of this machine at {limits.threads} thread(s): "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s read, "
        f"{limits.flops_per_second / 1e9:.0f} GFLOP/s (float32 matrix-matrix)"
    )

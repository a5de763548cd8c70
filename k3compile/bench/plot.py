"""The benchmark of kernels as a picture: a bar an implementation, as long as its share of the limit.

    experts_unfinalized  1 token, 4 experts       of 47.1 GB/s read
        meaning  |=                                1 %
        native   |==================              71 %

SVG written by hand: a file that opens anywhere, without a library.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from .kernels import Result, Timing
from .limits import MachineLimits

ROW, HEAD, LEFT, WIDTH, FULL = 16, 26, 150, 760, 480  # pixels; FULL is the length of the whole limit
LONGEST = 1.15  # a bar beyond the limit (a cell that a cache holds) ends here
COLOURS = {"meaning": "#9aa3ad"}
OURS, RIVAL = "#2b6cb0", "#c98a2b"
KINDS = {
    "bandwidth": lambda m: f"{m.bytes_per_second / 1e9:.1f} GB/s read",
    "read+write": lambda m: f"{m.copy_bytes_per_second / 1e9:.1f} GB/s read and written",
    "compute": lambda m: f"{m.flops_per_second / 1e9:.0f} GFLOP/s float32 matmul",
}


def svg(result: Result, implementations: frozenset[str]) -> str:
    """The whole file. implementations: names of what is ours; others but the meaning are rivals."""
    parts, y = [], 30
    for (op, case), cell in groupby(result.timings, key=lambda t: (t.op, t.case)):
        rows = list(cell)
        parts.append(heading(op, case, rows[0].kind, result.limits, y))
        y += HEAD
        for timing in rows:
            parts.append(bar(timing, y, implementations))
            y += ROW
        y += ROW // 2
    title = f"{result.limits.threads} threads" + (", others were running" if result.disturbed else "")
    line = (
        f'<line x1="{LEFT + FULL}" y1="24" x2="{LEFT + FULL}" y2="{y}" stroke="#444" stroke-dasharray="3 3"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT + FULL}" y="16" text-anchor="middle">limit of the machine ({escape(title)})</text>'
        f"{line}{''.join(parts)}</svg>\n"
    )


def heading(op: str, case: str, kind: str, limits: MachineLimits, y: int) -> str:
    """The name of a cell and what bounds it."""
    what = escape(f"{op}: {case}")
    return (
        f'<text x="8" y="{y + 14}" font-weight="bold">{what}</text>'
        f'<text x="{WIDTH - 8}" y="{y + 14}" text-anchor="end" fill="#666">of {KINDS[kind](limits)}</text>'
    )


def bar(timing: Timing, y: int, implementations: frozenset[str]) -> str:
    """One implementation: its name, its bar and the share in figures."""
    colour = COLOURS.get(timing.by, OURS if timing.by in implementations else RIVAL)
    length = max(1.0, FULL * min(timing.share, LONGEST))
    return (
        f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(timing.by)}</text>'
        f'<rect class="bar" x="{LEFT}" y="{y + 1}" width="{length:.1f}" height="{ROW - 4}" fill="{colour}"/>'
        f'<text x="{LEFT + length + 5:.1f}" y="{y + 11}">{timing.share:.0%}</text>'
    )

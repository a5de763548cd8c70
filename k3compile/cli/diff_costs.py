"""What `k3 diff` says of costs: a graph's, each pass's, those of Inductor's code, and all layers' together.

estimate: launches 52 -> 28 (-24)
          bytes_read by -5394*p.0 - 2616*step.spans[0]
inductor: launches 31 -> 22 (-9), allocations 12 -> 9 (-3)
all 93 layers: launches 4120 -> 2310 (-1810)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..graphdiff.measures import SYMBOL
from .diff_inputs import Comparison
from .sizes import known_sizes


def priced(one: Comparison) -> list[Any]:
    """The cost of either side."""
    from ..graphdiff.cost import cost

    return [cost(snapshot) for snapshot in (one.diff.before, one.diff.after)]


def costs(one: Comparison, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What both sides cost, numbers for ``sizes``, else expressions, and what generated code does."""
    made = {"generated": dict(one.generated)} if one.generated else {}
    return dict(zip(("before", "after"), [figures(c, sizes) for c in priced(one)])) | made


def figures(cost: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Numbers for ``sizes``; without any, the numbers that need none and formulas."""
    return cost.at(known_sizes(cost, sizes)) if sizes else cost.to_json()


def cost_rows(one: Comparison, sizes: Mapping[str, int]) -> list[str]:
    """Only what changed, a layer."""
    sides = priced(one)
    found = [figures(side, sizes) for side in sides]
    rows = []
    for name, old in () if one.diff.same else found[0].items():
        new = found[1].get(name)
        if name != "symbols" and old != new:
            numbers = isinstance(old, int) and isinstance(new, int)
            rows.append(f"{name} {step(old, new) if numbers else grown(name, *sides)}")
    if rows and one.generated:
        rows[0] = f"estimate: {rows[0]}"
    return [*rows, *generated_rows(one.generated)]


def grown(name: str, before: Any, after: Any) -> str:
    """What was added to a formula, ``-5394*p.0 - 4``, over what sizes measure."""
    import sympy

    names = {old: after.names.get(called, old) for called, old in (before.names or {}).items()}
    old = sympy.sympify(getattr(before, name))
    old = old.subs({s: sympy.Symbol(names.get(str(s), str(s)), integer=True) for s in old.free_symbols})
    words = str(sympy.expand(getattr(after, name) - old))
    words = SYMBOL.sub(lambda m: (after.symbols or {}).get(m[0], m[0]), words)
    return f"by {'' if words.startswith('-') else '+'}{words}"


def generated_rows(generated: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The counts of the inner compiler's code, as one row."""
    if not generated:
        return []
    after = generated.get("after", {})
    before = generated.get("before", after)
    return ["inductor's code: " + ", ".join(f"{k} {step(before.get(k, v), v)}" for k, v in after.items())]


def step(before: Any, after: Any) -> str:
    """``52 -> 28 (-24)``; once where nothing changed."""
    if before == after:
        return f"{after:,}" if isinstance(after, int) else str(after)
    if isinstance(before, int) and isinstance(after, int):
        return f"{before:,} -> {after:,} ({after - before:+,})"
    return f"{before} -> {after}"


def step_prices(one: Comparison, sizes: Mapping[str, int]) -> Iterator[str]:
    """For each stage after the first, what it changes of the sums that are numbers: ``launches -14``."""
    from ..graphdiff.cost import cost

    last: Mapping[str, Any] = {}
    for stage in one.timeline.stages:
        now = figures(cost(stage.snapshot), sizes)
        if last:
            yield ", ".join(
                f"{name} {now[name] - last[name]:+,}"
                for name in now
                if isinstance(now[name], int) and isinstance(last.get(name), int) and now[name] != last[name]
            )
        last = now


def total_rows(found: Sequence[Comparison], sizes: Mapping[str, int]) -> list[str]:
    """All layers together: of each kind times its layers, what is a number on both sides."""
    layers = sum(one.times for one in found)
    if layers == 1 or all(one.diff.same for one in found):
        return []
    what = "layers" if layers > len(found) else "graphs"
    sides = [[figures(side, sizes) for side in priced(one)] for one in found]
    names = [n for n in sides[0][0] if all(isinstance(side.get(n), int) for pair in sides for side in pair)]
    names = [n for n in names if n != "peak_bytes"]  # layers run one after another
    sums = {
        n: [sum(pair[i][n] * one.times for one, pair in zip(found, sides)) for i in (0, 1)] for n in names
    }
    changed = [f"{n} {step(*pair)}" for n, pair in sums.items() if pair[0] != pair[1]]
    rows = [f"all {layers} {what}: {', '.join(changed) or 'the same costs'}"]
    if all(one.generated.keys() >= {"before", "after"} for one in found):
        code = {
            moment: {
                k: sum(one.generated[moment].get(k, 0) * one.times for one in found)
                for k in found[0].generated["after"]
            }
            for moment in ("before", "after")
        }
        rows += [f"all {layers} {what}, {row}" for row in generated_rows(code)]
    return rows

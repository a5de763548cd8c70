"""K3_DUMP: the graph before and after every pass, as JSON for tools and as text for people; or in memory.

<dir>/<graph>/00-contiguous_views.before.json  .before.txt  .after.json  .after.txt
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from .passes.remarks import Remark
from .passes.snapshot import text
from .passes.symbol_names import SymbolNames

OnPass = Callable[[str, Any, Any, float], None]


class Seen(NamedTuple):
    """One pass over the graph called ``key``: its name and the snapshots before and after."""

    key: str
    name: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]


_listening: list[list[Seen]] = []


@contextmanager
def recording() -> Iterator[list[Seen]]:
    """Every pass that runs inside, in order; passes run even where a cache could answer."""
    seen: list[Seen] = []
    _listening.append(seen)
    try:
        yield seen
    finally:
        _listening.remove(seen)


def dumper(folder: Path | None, key: str) -> OnPass | None:
    """What the runner calls after each pass of graph ``key``; None where nobody wants to know."""
    listeners = list(_listening)
    if folder is None and not listeners:
        return None
    number = count()

    def tell(name: str, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> None:
        for seen in listeners:
            seen.append(Seen(key, name, before, after))
        if folder is not None:
            write(folder / key, f"{next(number):02d}-{name}", before, after)

    return tell


def told_in(symbols: SymbolNames, tell: OnPass) -> OnPass:
    """``tell``, with remarks in the names of the snapshots, their sources as snapshots give them."""

    def told(name: str, before: Any, after: Any, seconds: float) -> None:
        for remark in after.get("remarks", ()):
            remark |= symbols.remark(Remark.from_json(remark)).to_json()
            remark["source"] = remark["source"] and "/".join(Path(remark["source"]).parts[-2:])
        tell(name, before, after, seconds)

    return told


def write(target: Path, stem: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """The four files of one pass."""
    target.mkdir(parents=True, exist_ok=True)
    for moment, data in (("before", before), ("after", after)):
        (target / f"{stem}.{moment}.json").write_text(json.dumps(data, indent=1))
        (target / f"{stem}.{moment}.txt").write_text(text(data))

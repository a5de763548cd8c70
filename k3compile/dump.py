"""K3_DUMP: the graph before and after every pass, as JSON for tools and as text for people.

<dir>/<graph>/00-contiguous_views.before.json  .before.txt  .after.json  .after.txt
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from .passes.snapshot import text

OnPass = Callable[[str, Any, Any, float], None]


def dumper(folder: Path | None, key: str) -> OnPass | None:
    """What the runner calls after each pass of graph ``key``; None where nothing is to be dumped."""
    if folder is None:
        return None
    number = count()

    def write(name: str, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> None:
        target = folder / key
        target.mkdir(parents=True, exist_ok=True)
        stem = f"{next(number):02d}-{name}"
        for moment, data in (("before", before), ("after", after)):
            (target / f"{stem}.{moment}.json").write_text(json.dumps(data, indent=1))
            (target / f"{stem}.{moment}.txt").write_text(text(data))

    return write

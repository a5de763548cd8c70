"""What the backend did with a graph, kept with the process and beside the compile cache.

    <Inductor's cache folder>/k3/<key>.json      key = the computation of Dynamo's graph + our fingerprint

On a warm cache no pass runs and there would be nothing to tell; then the report of the compile that filled
the cache is read back. One artifact has one report, however often Dynamo calls the backend for it.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .passes.remarks import PassRecord, Remark
from .passes.symbol_names import meant

SCHEMA = "k3report/1"
log = logging.getLogger(__name__)
_lock = threading.Lock()
_reports: dict[str, Report] = {}
_files: dict[str, list[str]] = {}  # report file -> keys of the reports it holds


@dataclass(frozen=True)
class Report:
    """One compiled graph.

    status: ``compiled`` (passes ran), ``cached`` (read back, nothing ran), ``handed on`` (to the inner
    compiler without our passes, for ``reason``). features: their settings. records: passes in order,
    Dynamo's first. notes: what else the user should know. graphs: digest of the graph by stage. seconds:
    wall time of the compile, passes included. sources: the user's line behind each node of Dynamo's graph.
    generated: launches and allocations in the code Inductor made of each body (:mod:`generated`). sizes: what
    the symbols in remarks measure, for instance ``u1``: ``p.0``, the rows of ``p``.
    """

    key: str
    status: Literal["compiled", "cached", "handed on"]
    inner: str
    features: dict[str, str]
    records: tuple[PassRecord, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    graphs: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    sources: tuple[str | None, ...] = ()
    torch: str = ""
    generated: tuple[dict[str, int], ...] = ()
    sizes: dict[str, str] = field(default_factory=dict)

    @property
    def remarks(self) -> list[Remark]:
        """Every remark, in the order of the passes."""
        return [r for record in self.records for r in record.remarks]

    @property
    def pass_seconds(self) -> float:
        """Wall time of our passes."""
        return sum(record.seconds for record in self.records)

    def applied(self, pass_name: str) -> int:
        """Sites the pass rewrote."""
        return sum(r.pass_name == pass_name and r.kind == "applied" for r in self.remarks)

    def missed(self, pass_name: str) -> list[str]:
        """Why the pass left each of the others."""
        return [r.reason for r in self.remarks if r.pass_name == pass_name and r.kind == "missed"]

    @property
    def choices(self) -> dict[str, str]:
        """What computes each op: {"k3.rms_norm": "opened"}; several answers are joined by ' / '."""
        found: dict[str, list[str]] = {}
        for remark in self.remarks:
            if remark.pass_name != "lower" or not remark.op:
                continue
            if remark.reason not in found.setdefault(remark.op, []):
                found[remark.op].append(remark.reason)
        return {op: " / ".join(answers) for op, answers in sorted(found.items())}

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` reads it back."""
        data = asdict(self) | {"schema": SCHEMA, "records": [r.to_json() for r in self.records]}
        return json.loads(json.dumps(data))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """Raises ValueError for another schema, KeyError or TypeError for a file that is not a report."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not a {SCHEMA} report")
        fields = {k: v for k, v in data.items() if k != "schema"}
        fields["records"] = tuple(PassRecord.from_json(r) for r in data["records"])
        for name in ("notes", "sources", "generated"):
            fields[name] = tuple(data.get(name, ()))
        fields["graphs"] = tuple((stage, name) for stage, name in data["graphs"])
        return cls(**fields)

    def text(self) -> str:
        """The report for people: one block a pass, equal remarks folded."""
        lines = [
            f"graph {self.key}: {self.status} for {self.inner}" + (f": {self.reason}" if self.reason else "")
        ]
        lines += [f"  note: {note}" for note in self.notes]
        for record in self.records:
            name = f"{record.name}, body for {record.body}" if record.body else record.name
            lines.append(f"  {name}: {record.nodes_before} -> {record.nodes_after} nodes")
            lines += [f"    {line}" for line in folded(meant(r, self.sizes) for r in record.remarks)]
        for found in self.generated:
            lines.append("  generated code: " + ", ".join(f"{n} {what}" for what, n in found.items()))
        return "\n".join(lines)


def folded(remarks: Iterable[Remark], proofs: bool = True) -> list[str]:
    """Remarks as lines, those that differ only by node folded to 'x3'."""
    counts = Counter(
        (r.kind, r.op, r.source, r.reason, r.detail, r.fix_it, r.proofs if proofs else ()) for r in remarks
    )
    lines = []
    for (kind, op, source, reason, detail, fix_it, obligations), count in counts.items():
        where = f" at {short(source)}" if source else ""
        more = f" ({detail})" if detail else ""
        times = f" x{count}" if count > 1 else ""
        what = f" {op}" if op else ""  # a note may be about the whole graph
        lines.append(f"{kind}{times}{what}{where}: {reason}{more}")
        lines += [f"    {p.obligation}: {p.expression} [{p.how}]" for p in obligations]
        if fix_it:
            lines.append(f"    fix: {fix_it}")
    return lines


def short(source: str) -> str:
    """The last folder and the file of ``path:line``, which is enough to find it."""
    return "/".join(source.split("/")[-2:])


def keep(report: Report, folder: Path, file: str | None = None) -> Report:
    """Make ``report`` the latest of this process, store it in ``folder``, and write it to ``file`` too.

    A cached report is not written again: the folder already has it. A folder that cannot be written costs the
    stored report, not the compile.
    """
    with _lock:
        _reports.pop(report.key, None)
        _reports[report.key] = report
        keys = _files.setdefault(file, []) if file else []
        if file and report.key not in keys:
            keys.append(report.key)
        of_file = [_reports[k].to_json() for k in keys if k in _reports]
    try:
        if report.status != "cached":
            write_atomically(folder / f"{report.key}.json", report.to_json())
        if file:
            write_atomically(Path(file), {"schema": "k3reports/1", "reports": of_file})
    except OSError as error:
        log.warning("the report of graph %s was not stored: %s", report.key, error)
    return report


def stored(key: str, folder: Path) -> Report | None:
    """The report an earlier process stored for this key; None where there is none that can be read."""
    path = folder / f"{key}.json"
    try:
        return Report.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not a report and is ignored: %s", path, error)
        return None


def with_lines_of(report: Report, sources: Sequence[str | None]) -> Report:
    """A stored report, its source lines moved to where the same nodes are in today's file."""
    if len(sources) != len(report.sources) or tuple(sources) == report.sources:
        return report
    moved = dict(zip(report.sources, sources))
    records = tuple(
        replace(
            record, remarks=tuple(replace(r, source=moved.get(r.source, r.source)) for r in record.remarks)
        )
        for record in report.records
    )
    return replace(report, records=records, sources=tuple(sources))


def write_atomically(path: Path, data: dict[str, Any]) -> None:
    """A reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(data, stream, indent=1)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def all() -> list[Report]:
    """The reports of this process, latest last."""
    with _lock:
        return list(_reports.values())


def latest() -> Report:
    """The report of the last graph compiled. Raises LookupError before the first."""
    found = all()
    if not found:
        raise LookupError('nothing was compiled with backend="k3" in this process')
    return found[-1]


def forget() -> None:
    """Drop the reports of this process; the stored ones stay."""
    with _lock:
        _reports.clear()
        _files.clear()

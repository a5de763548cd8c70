"""How patient the ranks are with each other."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class WatchConfig:
    """Settings of a watch; the same on every rank. Raises one ValueError that lists what is out of range.

    step_deadline_s: seconds that a step of several ranks may take before the job ends, or four times what so
    many token rows have taken before. load_deadline_s: seconds that loading or compiling may take. silence_s:
    seconds without a sign of life of a rank; four times as long while it loads or compiles.
    """

    step_deadline_s: float = 8.0
    load_deadline_s: float = 3600.0
    silence_s: float = 5.0

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [f"{name} must be at least 1 second, got {v}" for name, v in values.items() if not v >= 1]
        if wrong:
            raise ValueError("; ".join(wrong))

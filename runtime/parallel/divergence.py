"""Where the collectives of two ranks part, in words.

    rank 0   118 allreduce_ [4, 128] float32 over 2       rank 1   118 allreduce_ [4, 128] float32 over 2
             119 broadcast_ [64] int64 over 2         !=           119 allreduce_ [4, 128] float32 over 2

A rank that made one call more or less, or another, computes with the others' numbers from there on, or waits
for what never comes. Either way the job has to end, and these two lists are where to look.
"""

from __future__ import annotations

from collections.abc import Sequence

from .recorder import Entry, Mark

AROUND = 4  # calls shown before and after the place


class Diverged(RuntimeError):
    """This rank made other collectives than rank 0."""


def compare(
    rank: int, mine: Mark, theirs: Mark, own: Sequence[Entry], leaders: Sequence[Entry] | None
) -> None:
    """Raise :class:`Diverged`, with the two lists where they part, unless the marks are equal.

    mine, theirs: of this rank and of rank 0, at the same moment between two steps. own: this rank's last
    calls. leaders: rank 0's, None where it did not answer.
    """
    if mine == theirs:
        return
    said = f"rank {rank} made {mine.count} collectives where rank 0 made {theirs.count}"
    if mine.count == theirs.count:
        said = f"the {mine.count} collectives of rank {rank} are not those of rank 0"
    if leaders is None:
        last = [f"  {entry.place} {entry.text}" for entry in own[-AROUND:]]
        raise Diverged("\n".join([f"{said}; rank 0 does not answer. This rank's last:", *last]))
    raise Diverged(f"{said}\n{parting({0: leaders, rank: own}) or NOWHERE}")


NOWHERE = "(the calls that are still listed are equal)"


def parting(lists: dict[int, Sequence[Entry]]) -> str | None:
    """The lists of two ranks or more around the first place where they differ, in what all of them still
    hold; None where they do not.
    """
    texts = {rank: dict(entries) for rank, entries in lists.items()}
    oldest = max((min(held) for held in texts.values() if held), default=0)
    newest = max((max(held) for held in texts.values() if held), default=-1)
    for place in range(oldest, newest + 1):
        if len({held.get(place) for held in texts.values()}) > 1:
            return shown(texts, place)
    return None


def shown(texts: dict[int, dict[int, str]], place: int) -> str:
    """Each rank's calls around ``place``, which is marked; ranks with the same calls share a list."""
    late = [rank for rank, held in texts.items() if place not in held]
    out = [f"the lists part at collective {place}:"]
    if late and len({held[place] for held in texts.values() if place in held}) == 1:
        out = [f"rank {', '.join(map(str, late))} did not come to collective {place}:"]
    groups: dict[tuple, list[int]] = {}
    for rank, held in texts.items():
        window = tuple(held.get(i) for i in range(place - AROUND, place + AROUND + 1))
        groups.setdefault(window, []).append(rank)
    for window, ranks in groups.items():
        out.append(f"  rank {', '.join(map(str, ranks))}:")
        for i, text in enumerate(window, place - AROUND):
            if text is not None or i == place:
                out.append(f"  {'>' if i == place else ' '} {i} {text or '(no more calls)'}")
    return "\n".join(out)

"""The ledger: every operation that completed, in order, with who took part and from where.

The same program and schedule seed give the same ledger byte for byte (`Ledger.to_json`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from .callsite import Site


class Entry(NamedTuple):
    """One completed collective, or one delivered message.

    Tuples by rank are in the order of `ranks`; for a message, `ranks` is (source, destination).
    """

    op: str
    """The collective's name, or "send" for a message."""
    group: str
    """The group's name, such as "tp"."""
    ranks: tuple[int, ...]
    """Global ranks that took part."""
    sequence: int
    """The operation's number on its group; for a message, its number on its channel."""
    dtype: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    """For each rank the shapes of its operands (inputs, or outputs where it has none)."""
    bytes: int
    """Bytes that crossed between ranks in all, by the ring algorithm."""
    detail: str
    """Reduce op, root or tag."""
    sites: tuple[Site, ...]
    """For each rank its call site."""

    def to_json(self) -> dict[str, Any]:
        """As plain data; a shape that all ranks share is given once."""
        shapes = self.shapes[:1] if len(set(self.shapes)) == 1 else self.shapes
        sites = [str(site) for site in self.sites]
        return {
            "op": self.op,
            "group": self.group,
            "ranks": list(self.ranks),
            "sequence": self.sequence,
            "dtype": self.dtype,
            "shapes": [[list(shape) for shape in of_rank] for of_rank in shapes],
            "bytes": self.bytes,
            "detail": self.detail,
            "sites": sites[:1] if len(set(sites)) == 1 else sites,
        }


class Ledger:
    """An append-only list of entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, entry: Entry) -> None:
        """Record one operation."""
        self.entries.append(entry)

    def clear(self) -> None:
        """Forget everything, for example between the building of a model and its first step."""
        self.entries.clear()

    def copy(self) -> Ledger:
        """A ledger of its own with what has been recorded until now."""
        copied = Ledger()
        copied.entries = list(self.entries)
        return copied

    def __len__(self) -> int:
        return len(self.entries)

    def to_json(self) -> str:
        """One line of JSON for each entry."""
        return "\n".join(json.dumps(entry.to_json(), sort_keys=True) for entry in self.entries)

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """{(group, op): (count, bytes)}, sorted."""
        return totals(self.entries)


def totals(entries: Sequence[Entry]) -> dict[tuple[str, str], tuple[int, int]]:
    """{(group, op): (count, bytes)} of these entries, sorted by group and op."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in entries:
        count, size = sums.get((entry.group, entry.op), (0, 0))
        sums[entry.group, entry.op] = (count + 1, size + entry.bytes)
    return dict(sorted(sums.items()))


def canonical(entries: Sequence[Entry]) -> list[Entry]:
    """These entries in the order in which ledgers of different transports are compared.

    By group, then its ranks, then collectives before messages, then number: each group's own order
    stands. Which of two groups came first depends on the scheduler, so it is no part of it.
    """
    return sorted(entries, key=lambda e: (e.group, e.ranks, e.op == "send", e.sequence))


def first_difference(one: Sequence[Entry], other: Sequence[Entry]) -> str | None:
    """Where two ledgers of one run of a program differ, in one line; None if they are equal."""
    ours = [entry.to_json() for entry in canonical(one)]
    theirs = [entry.to_json() for entry in canonical(other)]
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f"{json.dumps(a, sort_keys=True)} is not {json.dumps(b, sort_keys=True)}"
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        extra = json.dumps(longer[min(len(ours), len(theirs))], sort_keys=True)
        return f"{len(ours)} entries are not {len(theirs)}; the first of the rest is {extra}"
    return None

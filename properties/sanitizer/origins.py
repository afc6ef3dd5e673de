"""Where a whole tensor was made: what earlier operations of a group gave to all its ranks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from properties.sanitizer import bits
from sim.callsite import Site

MOST = 4096
"""Outputs remembered for each group; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that made a tensor whole on all ranks of a group."""

    op: str
    site: Site
    """Where it was called."""
    is_sum: bool
    """Whether it was a sum over ranks."""

    def __str__(self) -> str:
        site = str(self.site)
        return f"the {self.op} at {site}" if site else f"an earlier {self.op}"


class Origins:
    """What the operations of each group, by its global ranks, gave to all its ranks.

    Only fingerprints are kept, so that no tensor lives longer than in the program.
    """

    def __init__(self) -> None:
        self._of_group: dict[tuple[int, ...], OrderedDict[bytes, Origin]] = {}

    def add(self, ranks: tuple[int, ...], output: bits.Parts, origin: Origin) -> None:
        """Remember an output that all ranks get. A sum is not displaced by what moves it on."""
        known = self._of_group.setdefault(ranks, OrderedDict())
        key = bits.digest(output)
        before = known.get(key)
        known[key] = before if before is not None and before.is_sum else origin
        known.move_to_end(key)
        if len(known) > MOST:
            known.popitem(last=False)

    def find(self, ranks: tuple[int, ...], parts: bits.Parts) -> Origin | None:
        """The operation of this group that gave exactly these bits to all its ranks."""
        known = self._of_group.get(ranks)
        return known.get(bits.digest(parts)) if known else None

    def find_any(self, rank: int, parts: bits.Parts) -> tuple[tuple[int, ...], Origin] | None:
        """The group with this rank, and the operation of it, that gave exactly these bits."""
        if not parts or not bits.telling(parts):
            return None
        print_of = bits.digest(parts)
        for ranks, known in self._of_group.items():
            if rank in ranks and print_of in known:
                return ranks, known[print_of]
        return None

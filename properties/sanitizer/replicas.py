"""Gathers of what is whole in each group, but not over another group: the wrong group was given."""

from __future__ import annotations

from collections import defaultdict

from properties.sanitizer.groups import Groups, Ranks
from sim.callsite import Frame

_MOST = 256
"""Gathers remembered for each site and rank; later ones only confirm."""

Site = tuple[str, tuple[Frame, ...]]


class WholeGathers:
    """Remembers gathers to which all ranks of a group gave equal bits, by fingerprints."""

    def __init__(self) -> None:
        self._given: defaultdict[Site, dict[int, list[bytes]]] = defaultdict(dict)

    def add(self, site: Site, ranks: Ranks, print_of: bytes) -> None:
        """All ranks of a group gave the tensor with this fingerprint at this site."""
        for rank in ranks:
            given = self._given[site].setdefault(rank, [])
            if len(given) < _MOST:
                given.append(print_of)

    def meant(self, site: Site, ranks: Ranks, groups: Groups) -> Ranks | None:
        """A group that crosses this one and each of whose ranks gave something else at the site,
        each time: shards over it. None if there is none."""
        given = self._given[site]
        for over in groups.crossing(ranks):
            if not all(rank in given for rank in over):
                continue
            if len({len(given[rank]) for rank in over}) > 1:
                continue
            steps = zip(*(given[rank] for rank in over), strict=True)
            if all(len(set(prints)) == len(over) for prints in steps):
                return over
        return None

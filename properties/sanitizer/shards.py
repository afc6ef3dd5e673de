"""Shards cut over one group and gathered over another, which gives nobody the whole.

Bits alone do not tell a wrong group from a dispatch that gathers the shards of several replicas.
What does is the whole run: the shards are scattered over a group, or cut in turn from a tensor
that is the same on it, they are gathered over groups that cross it, and nothing ever puts
together anything over that group: no collective, no message. A dispatch comes back to it.

Gathered over too large a group, the same shards are there several times. That is said of shards
that are the same on all its likes, and only if nothing else happens on the large group.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from properties.sanitizer import bits
from properties.sanitizer.groups import Groups, Ranks
from properties.sanitizer.slices import slice_of, storage_of
from sim.calls import Call
from sim.callsite import Frame

_MOST = 4096

Site = tuple[str, tuple[Frame, ...]]
"""Op and frames of a gather."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a rank's shard comes from."""

    index: int
    count: int
    whole: bytes
    """A fingerprint of the tensor that it was cut from, or of the scatter."""
    over: Ranks | None
    """The group that it was scattered over; None for a slice."""
    origin: str


@dataclass(slots=True)
class _Gathers:
    """The gathers at a site: the shards that each rank gave, and over which group."""

    shards: dict[int, list[Shard]] = field(default_factory=dict)
    groups: dict[int, Ranks] = field(default_factory=dict)


class CutShards:
    """Remembers where shards come from and over what they are gathered, by fingerprints."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._scattered: dict[int, OrderedDict[bytes, Shard]] = defaultdict(OrderedDict)
        self._sites: dict[Site, _Gathers] = {}
        self._together: set[tuple[frozenset[int], Site | None]] = set()
        """Ranks whose values were put together, and by which gather."""

    def collective(self, ranks: Ranks, calls: Sequence[Call]) -> None:
        """A collective over these ranks, before its outputs are written."""
        first = calls[0]
        if first.op == "scatter":
            self._scatter(ranks, calls)
        elif first.op == "broadcast":
            if self._sites:
                self._together.add((frozenset(ranks), None))
        elif first.inputs and not (first.op == "all_reduce" and _single(first)):
            self._together.add((frozenset(ranks), (first.op, first.site.frames)))

    def message(self, sender: int, receiver: int) -> None:
        """A message between two ranks."""
        self._together.add((frozenset((sender, receiver)), None))

    def gather(self, ranks: Ranks, calls: Sequence[Call], by_rank: Sequence[bits.Parts]) -> None:
        """An operand of an all-gather that differs by rank."""
        shards = [self._shard(call.rank, parts) for call, parts in zip(calls, by_rank, strict=True)]
        if any(shard is None for shard in shards):
            return
        here = self._sites.setdefault((calls[0].op, calls[0].site.frames), _Gathers())
        for rank, shard in zip(ranks, shards, strict=True):
            assert shard is not None
            here.groups[rank] = ranks
            here.shards.setdefault(rank, []).append(shard)

    def wrong(self) -> list[tuple[Site, Ranks, Ranks, str]]:
        """Gathers over the wrong group: site, its group, the group of the shards, their origin."""
        found = []
        for site, here in self._sites.items():
            for ranks in dict.fromkeys(here.groups.values()):
                over = self._across(ranks, here) or self._inside(ranks, here, site)
                if over is not None:
                    found.append((site, ranks, over, here.shards[over[0]][0].origin))
        return found

    def _across(self, ranks: Ranks, here: _Gathers) -> Ranks | None:
        for over in self._groups.crossing(ranks):
            crosses = all(len(set(over).intersection(here.groups.get(r, ()))) == 1 for r in over)
            if crosses and _cut_over(over, here) and not self._united(over):
                return over
        return None

    def _inside(self, ranks: Ranks, here: _Gathers, site: Site) -> Ranks | None:
        if self._united(ranks, but=site):
            return None

        def repeats(over: Ranks) -> bool:
            family = self._groups.family(over, ranks) if len(over) < len(ranks) else []
            cut = bool(family) and all(_cut_over(group, here) for group in family)
            return cut and len({here.shards[group[0]][0].whole for group in family}) == 1

        return self._groups.within(ranks, repeats)

    def _scatter(self, ranks: Ranks, calls: Sequence[Call]) -> None:
        root = calls[calls[0].root or 0]
        parts = root.inputs[0]
        if not all(bits.telling([part]) for part in parts):
            return
        whole = bits.digest(parts)
        for index, (call, part) in enumerate(zip(calls, parts, strict=True)):
            known = self._scattered[call.rank]
            origin = f"scattered at {root.site}"
            known[bits.digest([part])] = Shard(index, len(calls), whole, ranks, origin)
            if len(known) > _MOST:
                known.popitem(last=False)

    def _shard(self, rank: int, parts: bits.Parts) -> Shard | None:
        place = slice_of(parts[0])
        if (place is None and not self._scattered) or not bits.telling(parts):
            return None
        if self._scattered:
            shard = self._scattered[rank].get(bits.digest(parts))
            if shard is not None:
                return shard
        if place is None:
            return None
        return Shard(*place, bits.digest([storage_of(parts[0])]), None, "cut from equal tensors")

    def _united(self, over: Ranks, but: Site | None = None) -> bool:
        """Whether anything put together what two ranks of a group hold, beside a gather."""
        return any(
            len(each.intersection(over)) > 1 and (but is None or site != but)
            for each, site in self._together
        )


def _cut_over(over: Ranks, here: _Gathers) -> bool:
    """Whether all that the ranks of a group gave is shards over the group, in order."""
    if len({len(here.shards.get(rank, ())) for rank in over}) > 1 or over[0] not in here.shards:
        return False
    for of_ranks in zip(*(here.shards[rank] for rank in over), strict=True):
        if len({shard.whole for shard in of_ranks}) > 1:
            return False
        if [shard.index for shard in of_ranks] != [*range(len(over))]:
            return False
        # A scatter over another group of the same size may have moved the same values.
        if any(s.count != len(over) or s.over not in (None, over) for s in of_ranks):
            return False
    return True


def _single(call: Call) -> bool:
    return all(tensor.numel() == 1 for tensor in call.operands())

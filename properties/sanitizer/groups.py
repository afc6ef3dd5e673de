"""The groups that a program has: those that it made, those with traffic, those of its topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from sim import Topology

Ranks = tuple[int, ...]


class Groups:
    """Known groups by their global ranks, each with a name, the first one given."""

    def __init__(self, topology: Topology | None = None) -> None:
        self._names: dict[Ranks, str] = {}
        self._axes: dict[Ranks, str] = {}
        if topology is not None:
            for axis in ("tp", "pp", "dp"):
                for ranks in topology.groups[axis]:
                    if 1 < len(ranks) < topology.world_size:
                        self._axes[ranks] = axis

    def add(self, ranks: Ranks, name: str) -> None:
        """Remember a group."""
        self._names.setdefault(ranks, name)

    def add_made(self) -> None:
        """Remember the groups that the rank which runs now has made and is in, used or not."""
        for group, ranks in c10d._world.pg_group_ranks.items():
            # torch's mark for a group that this rank is not in is a number.
            if len(ranks) > 1 and isinstance(group, ProcessGroup):
                in_order = tuple(sorted(ranks, key=lambda rank: ranks[rank]))
                self.add(in_order, str(group.group_desc or group.group_name))

    def name(self, ranks: Ranks) -> str:
        """A group in a sentence, such as "tp[0, 1]" or, without a name, "ranks [0, 1]"."""
        name = self._names.get(ranks, "")
        if not name or name.isdigit() or name == "undefined":
            name = self._axes.get(ranks, "")
        return f"{name}{[*ranks]}" if name else f"ranks {[*ranks]}"

    def within(self, ranks: Iterable[int], fits: Callable[[Ranks], bool]) -> Ranks | None:
        """The smallest group inside these ranks, of two ranks or more, that fits."""
        inside = set(ranks)
        known = [g for g in (*self._names, *self._axes) if inside.issuperset(g)]
        return next((g for g in sorted(known, key=lambda g: (len(g), g)) if fits(g)), None)

    def family(self, group: Ranks, ranks: Ranks) -> list[Ranks]:
        """Known groups of one size, this one among them, that cover the ranks, each rank once; []
        if there are none."""
        known = [g for g in {*self._names, *self._axes} if len(g) == len(group)]

        def cover(chosen: list[Ranks], left: set[int]) -> list[Ranks]:
            if not left:
                return chosen
            for each in known:
                if min(left) in each and left.issuperset(each):
                    found = cover([*chosen, each], left.difference(each))
                    if found:
                        return found
            return []

        return cover([group], set(ranks).difference(group)) if set(ranks) >= set(group) else []

    def crossing(self, ranks: Sequence[int]) -> list[Ranks]:
        """The groups that share one rank alone with these ranks, in order of their ranks."""
        here = set(ranks)
        known = {*self._names, *self._axes}
        return sorted(g for g in known if len(here.intersection(g)) == 1)

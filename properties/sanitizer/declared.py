"""Values that a program declares replicated: collected from each rank, and compared.

A declaration moves no data and waits for nobody. The k-th one of each rank at a line belong
together, and are compared when the last rank of the group has made its own. Where some ranks
declare more often than others there is no telling which belong together: nothing is said, and
the declaration is counted as not judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from properties.sanitizer import differ
from properties.sanitizer.groups import Groups, Ranks
from properties.sanitizer.origins import Origins
from properties.sanitizer.rules import Said
from sim.callsite import Frame

Place = tuple[str, Ranks, tuple[Frame, ...]]
"""Name, global ranks and frames of a declaration."""


@dataclass(slots=True)
class _Declared:
    """What the ranks have declared at a place."""

    waiting: dict[int, deque[list[torch.Tensor]]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    said: list[tuple[Said, str]] = field(default_factory=list)
    """What is wrong, with a description of the value."""
    judged: int = 0


class Declarations:
    """Compares what the ranks of a group declare replicated. Values are copied."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._places: dict[Place, _Declared] = {}

    def add(
        self,
        rank: int,
        ranks: Ranks,
        value: Sequence[torch.Tensor],
        *,
        name: str,
        frames: tuple[Frame, ...],
        origins: Origins,
    ) -> None:
        """A rank declares that its value is the same on all of these ranks.

        Args:
            rank: the global rank that declares it.
            ranks: the group's global ranks.
            value: its tensors.
            name: how to call it.
            frames: where; the innermost one tells declarations apart.
            origins: what earlier operations gave to ranks.
        """
        if rank not in ranks or len(ranks) < 2:
            return
        here = self._places.setdefault((name, ranks, frames[:1]), _Declared())
        copies = [tensor.detach().clone() for tensor in value]
        here.waiting.setdefault(rank, deque()).append(copies)
        here.counts[rank] = here.counts.get(rank, 0) + 1
        if not all(here.waiting.get(each) for each in ranks):
            return
        values = [here.waiting[each].popleft() for each in ranks]
        here.judged += 1
        with torch.no_grad():
            if not differ.all_same(values):
                what = ", ".join(f"{str(t.dtype)[6:]}{[*t.shape]}" for t in values[0][:3])
                here.said.append((self._explained(name, ranks, values, origins), what))

    @property
    def judged(self) -> int:
        """How many declared values were compared."""
        places = self._places.items()
        return sum(each.judged for (_, ranks, _), each in places if _complete(each, ranks))

    @property
    def not_judged(self) -> list[str]:
        """Declarations that some ranks made more often than others, each in a line."""
        lines = []
        for (name, ranks, frames), each in self._places.items():
            if not _complete(each, ranks):
                often = ", ".join(f"{each.counts.get(r, 0)} on rank {r}" for r in ranks)
                at = f" at {frames[0]}" if frames else ""
                lines.append(f"`{name}`{at} was declared {often}: not compared")
        return lines

    def said(self) -> list[tuple[Place, Said, str]]:
        """What is wrong, in order of the places, with a description of each value."""
        return [
            (place, said, what)
            for place, each in self._places.items()
            if _complete(each, place[1])
            for said, what in each.said
        ]

    def _explained(
        self, name: str, ranks: Ranks, values: Sequence[list[torch.Tensor]], origins: Origins
    ) -> Said:
        held = dict(zip(ranks, values, strict=True))
        groups = self._groups
        alike = groups.within(ranks, lambda g: differ.all_same([held[r] for r in g]))
        cure = self._cure(ranks, held)
        if cure is None and alike is not None:
            cure = groups.within(ranks, lambda g: not differ.all_same([held[r] for r in g]))
        cure = cure or ranks
        what = f"`{name}` is declared replicated and differs over {groups.name(cure)}"
        looks = differ.relation([held[r] for r in cure], cure) or differ.relation(values, ranks)
        if alike is not None and len(alike) < len(ranks):
            what += f", though not over {groups.name(alike)}"
        if looks:
            what += f": {looks}"
        made = [origins.find_any(rank, held[rank]) for rank in ranks]
        if made[0] is not None and all(made):
            given, origin = made[0]
            why = (
                f"it is what {origin} gave to {groups.name(given)}: the wrong group? It has to be "
                f"made whole over {groups.name(cure)}"
            )
        elif "only rank" in looks:
            why = "a broadcast is missing; or use all_reduce where reduce was used"
        elif "shapes" in looks or "a part of its own" in looks:
            why = f"a gather over {groups.name(cure)} is missing"
        else:
            why = (
                f"each rank holds a value of its own. If they are terms of a sum, a reduction over "
                f"{groups.name(cure)} is missing; if they are shards, a gather is"
            )
        return Said(what=what, why=why)

    def _cure(self, ranks: Ranks, held: dict[int, list[torch.Tensor]]) -> Ranks | None:
        """The smallest group whose sums, and those of its likes, are the same on all ranks."""

        def sums(group: Ranks) -> list[torch.Tensor]:
            parts = zip(*(held[r] for r in group), strict=True)
            return [torch.stack([t.double() for t in tensors]).sum(0) for tensors in parts]

        kinds = {t.dtype for t in held[ranks[0]]}
        if not all(kind.is_floating_point for kind in kinds):
            return None
        shapes = {tuple((tuple(t.shape), t.dtype) for t in value) for value in held.values()}
        if len(shapes) > 1:
            return None

        def rounded(group: Ranks) -> list[torch.Tensor]:
            return [s.to(t.dtype) for s, t in zip(sums(group), held[ranks[0]], strict=True)]

        def cures(group: Ranks) -> bool:
            if len(group) == len(ranks) or differ.all_same([held[r] for r in group]):
                return False
            family = self._groups.family(group, ranks)
            return bool(family) and differ.all_same([rounded(g) for g in family], len(ranks))

        return self._groups.within(ranks, cures)


def _complete(declared: _Declared, ranks: Ranks) -> bool:
    """Whether all ranks have declared equally often."""
    return len({declared.counts.get(rank, 0) for rank in ranks}) == 1

"""The readings of one group's local values: each placement that their shapes allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from properties.placement import Placement, shard_rows
from properties.recogniser_rows import RowFault, deviation, near

ORDER = ("replicate", "shard", "features", "partial")
"""The placements, in the order in which they are tried after the expected one."""


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What the local values of one group are."""

    kind: str
    """One of `ORDER`; or "unreduced" (taken before the reduction), "not finite", "stale", "wrong
    group", "missing", "duplicated", "swapped" or "padding" (rows), "counted" (a part of the sum,
    `factor` times), "mixed" (a part of other rows), "shards
    summed", "features swapped", "scaled", "shapes", "unknown"."""
    axis: str
    text: str
    """In words, one line."""
    placement: str = ""
    """The one of `ORDER` as which the values were read, or "" where none fits their shapes."""
    times: int = 1
    """How many times the full value it is, or has the part."""
    factor: float = 1.0
    """The same where it need not be a whole number."""
    foreign: bool = False
    """Whether the part does not belong into the full value at all."""
    rows: tuple[int, ...] = ()
    """The rows that are wrong: of the full value, or of the local one where it has more rows."""
    origins: tuple[int, ...] = ()
    """Whose rows they are, one for each, where that is known."""
    ranks: tuple[int, ...] = ()
    """Positions in the group of the ranks that are wrong."""
    source: str = ""
    """The earlier tap or the other group whose values they are, or the part that is counted."""
    off: float = 0.0
    """Largest absolute deviation from what is named; 0.0 is exact. For "unknown" and wrong rows
    the deviation of the best guess, `placement` and `times`, from the full value."""


class Case:
    """One question to the recogniser, with what several answers need."""

    def __init__(
        self,
        local: Sequence[Tensor],
        truth: Tensor,
        bound: float,
        *,
        axis: str,
        first: str = "",
        padding: int = 0,
    ) -> None:
        self.local, self.truth, self.bound, self.axis = local, truth, bound, axis
        self.first = first
        """Kind of the expected placement, or ""."""
        self.padding = padding
        """Padding rows that the whole value may have at its end."""
        self.size = len(local)
        self.numbers = True
        """Whether the values are quantities; sums and multiples of ids mean nothing."""
        self.full_shaped = all(value.shape == truth.shape for value in local)

    def read(self, kind: str, like: Tensor) -> Tensor | None:
        """The values read as one placement of a full value like this; None if shapes forbid it.

        Float64 [T, ...]; replicated ones are [R, T, ...].
        """
        local, shape = self.local, like.shape
        if kind in ("replicate", "partial"):
            if any(value.shape != shape for value in local):
                return None
            stacked = torch.stack([*local]).double()
            return stacked if kind == "replicate" else stacked.sum(0)
        if kind == "shard":
            if any(value.shape[1:] != shape[1:] for value in local):
                return None
            rows = [value.shape[0] for value in local]
            padded = {shard_rows(shape[0] + more, self.size) for more in (0, self.padding)}
            if sum(rows) != shape[0] and not (len({*rows}) == 1 and rows[0] in padded):
                return None
            return torch.cat([*local]).double()[: shape[0]]
        if len(shape) < 2 or any(value.shape[:-1] != shape[:-1] for value in local):
            return None
        if sum(value.shape[-1] for value in local) != shape[-1]:
            return None
        return torch.cat([*local], -1).double()

    def off(self, kind: str, target: Tensor) -> float:
        value = self.read(kind, target)
        return float("inf") if value is None else deviation(value, target)

    def kinds(self) -> Iterator[str]:
        """The placements to try, the expected one first."""
        if self.first:
            yield self.first
        for kind in ORDER:
            # A shard of one token has the shape of the full value, and any values on the other
            # ranks would be its padding: no evidence for shards where none are expected.
            if kind != self.first and not (self.first and kind == "shard" and self.full_shaped):
                yield kind

    def match(self, target: Tensor | None = None, times: int = 1) -> Recognised | None:
        """The first placement of so many times the target (the truth) that fits."""
        target = self.truth if target is None else target
        for kind in self.kinds():
            if kind == "partial" and (self.size == 1 or self.is_noise(target) or self.alike()):
                continue
            off = self.off(kind, target * times)
            # An expected sum has its own bound: the one given.
            summed = self.size if kind == "partial" and kind != self.first else 1
            if off <= self.bound * times * summed:
                return self.placed(kind, times, off)
        return None

    def alike(self) -> bool:
        """Whether all ranks hold the same where a sum is not expected: then it is no sum's addend,
        for which each rank has its own, even if so many of them add up to the full value."""
        if self.first in ("", "partial") or any(v.shape != self.truth.shape for v in self.local):
            return False
        return all(near(value, self.local[0].double(), self.bound) for value in self.local[1:])

    def is_noise(self, target: Tensor) -> bool:
        """Whether rounding alone explains everything: a sum that fits then says nothing."""
        noise = self.bound * self.size
        return near(target, torch.zeros_like(target), noise) and all(
            near(value, torch.zeros_like(value, dtype=torch.float64), noise) for value in self.local
        )

    def placed(self, kind: str, times: int, off: float) -> Recognised:
        text = str(self.name(kind))
        if times > 1:
            text = f"{times} x " + ("the full value" if kind == "replicate" else text)
        wrong = tuple(range(self.size)) if times > 1 else ()
        return Recognised(
            kind=kind,
            axis=self.axis,
            text=text,
            placement=kind,
            times=times,
            ranks=wrong,
            off=off,
        )

    def name(self, kind: str) -> str:
        if kind == "features":
            return f"Shard(features, {self.axis})"
        return str(Placement(kind, self.axis))

    def fault(self, found: RowFault, placement: str, off: float) -> Recognised:
        return Recognised(
            kind=found.kind,
            axis=self.axis,
            text=found.text,
            placement=placement,
            rows=found.rows,
            origins=found.origins,
            ranks=self.wrong_ranks(placement, found.rows),
            source=found.source,
            off=off,
        )

    def wrong_ranks(self, placement: str, rows: Sequence[int]) -> tuple[int, ...]:
        """Who has the wrong rows: the owners of shards, and all where a sum is wrong."""
        if placement == "replicate" and self.full_shaped:
            return tuple(i for i, v in enumerate(self.local) if not near(v, self.truth, self.bound))
        if placement == "shard":
            held = [value.shape[0] for value in self.local]
            if sum(held) < len(self.truth):
                # Rows are missing: whose they are, only the even split can tell.
                held = [shard_rows(len(self.truth), self.size)] * self.size
            ends = [*accumulate(held)]
            return tuple(sorted({sum(row >= end for end in ends) for row in rows}))
        return tuple(range(self.size))

    def looked_at(self, rank: int | None) -> int:
        """The rank to look at where each should have the full value: a wrong one."""
        wrong = self.wrong_ranks("replicate", ())
        return rank if rank is not None and rank in wrong else next(iter(wrong), 0)

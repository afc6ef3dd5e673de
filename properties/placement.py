"""Placements: how the ranks' local values of a tensor make up its full value.

The names are DTensor's. Here they are about the token-by-feature activations between the parts
of a layer: replicated over an axis, partial sums over it, or shards of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sim import Topology

AXES = ("tp", "ep", "dp")


class PlacementError(ValueError):
    """A placement's text that means nothing, or local values that cannot be placed so."""


@dataclass(frozen=True)
class Placement:
    """How a value is placed over one axis; it is replicated over the others."""

    kind: str = "replicate"
    """"replicate", "partial" (the full value is the sum of the local ones), "shard" (the rows
    of the ranks one after the other, with padding rows at the end) or "heads" (the heads of the
    ranks, dim 1, side by side)."""
    axis: str = "tp"
    heads: int = 0
    """Of "heads", how many there are in all. Where there are fewer than ranks, each is on as many
    ranks as it takes, side by side: rank r of R has head r // (R / heads)."""

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Placement:
        """From a tap's declaration: "replicate", "partial:AXIS", "shard:AXIS" or
        "heads:AXIS:COUNT".

        Raises:
            PlacementError: any other text.
        """
        kind, _, axis = text.partition(":")
        if text == "replicate" or (kind in ("partial", "shard") and axis in AXES):
            return cls(kind, axis or "tp")
        axis, _, count = axis.partition(":")
        if kind == "heads" and axis in AXES and count.isdecimal() and int(count):
            return cls(kind, axis, int(count))
        raise PlacementError(
            f"{text!r} is no placement; use replicate, partial:tp, shard:tp or heads:tp:4"
        )

    def __str__(self) -> str:
        return {
            "replicate": "Replicate",
            "partial": f"Partial({self.axis})",
            "shard": f"Shard(tokens, {self.axis})",
            "heads": f"Shard(heads, {self.axis})",
        }[self.kind]

    def full_values(
        self, topology: Topology, local: Mapping[int, torch.Tensor], tokens: int
    ) -> dict[tuple[int, ...], torch.Tensor]:
        """The full value that each set of ranks holds, in float64.

        Args:
            topology: the ranks' layout.
            local: each rank's local value, [rows, ...].
            tokens: rows of the full value.

        Returns:
            {(rank,): value} where replicated, else {ranks of the group: value}; of repeated heads
            one value for each set of ranks that have every head once.

        Raises:
            PlacementError: a group has the tap on some of its ranks only, or with shapes that
                do not fit together.
        """
        if self.kind == "replicate":
            return {(rank,): value.double() for rank, value in local.items()}
        full = {}
        for group in topology.groups[self.axis]:
            have = [rank for rank in group if rank in local]
            if not have:
                continue
            if len(have) != len(group):
                raise PlacementError(f"ranks {have} of {list(group)} have it, the others do not")
            for ranks in self.wholes(group):
                full[ranks] = self.combine([local[rank] for rank in ranks], tokens)
        return full

    def wholes(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The sets of ranks of a group that have a full value between them."""
        repeats = max(1, len(group) // self.heads) if self.kind == "heads" else 1
        return [group[first::repeats] for first in range(repeats)]

    def first_row(self, topology: Topology, rank: int, tokens: int) -> int:
        """The row of the full value of so many tokens that a rank's value begins with."""
        if self.kind != "shard":
            return 0
        group = topology.group_of(rank, self.axis)
        return group.index(rank) * shard_rows(tokens, len(group))

    def combine(self, parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """The full value, in float64, of one group's local values in group order.

        Raises:
            PlacementError: the shapes do not fit together.
        """
        if not parts:
            return torch.empty(0)
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            raise PlacementError(f"the ranks' shapes differ: {sorted(map(list, shapes))}")
        if self.kind == "shard":
            rows = shard_rows(tokens, len(parts))
            if parts[0].shape[0] != rows:
                raise PlacementError(
                    f"every rank has {parts[0].shape[0]} rows where its shard of {tokens} tokens "
                    f"has {rows}"
                )
            return torch.cat([part.double() for part in parts])[:tokens]
        if self.kind == "heads":
            have = sum(part.shape[1] for part in parts)
            if have != self.heads:
                raise PlacementError(
                    f"ranks have {parts[0].shape[1]} heads each, {have} in all, of {self.heads}"
                )
            return torch.cat([part.double() for part in parts], dim=1)
        return torch.stack([part.double() for part in parts]).sum(0)


def shard_rows(tokens: int, ranks: int) -> int:
    """Rows of each rank's token shard, padding included: ceil(tokens / ranks)."""
    return -(-tokens // ranks)

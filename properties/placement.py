"""Placements: how the ranks' local values of a tensor make up its full value.

The names are DTensor's. Here they are about the token-by-feature activations between the parts
of a layer: replicated over an axis, partial sums over it, or shards of the tokens.
"""

from __future__ import annotations

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
    """"replicate", "partial" (the full value is the sum of the local ones) or "shard" (the rows
    of the ranks one after the other, with padding rows at the end)."""
    axis: str = "tp"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """From a tap's declaration: "replicate", "partial:AXIS" or "shard:AXIS".

        Raises:
            PlacementError: any other text.
        """
        kind, _, axis = text.partition(":")
        if text == "replicate" or (kind in ("partial", "shard") and axis in AXES):
            return cls(kind, axis or "tp")
        raise PlacementError(f"{text!r} is no placement; use replicate, partial:tp or shard:tp")

    def __str__(self) -> str:
        return {
            "replicate": "Replicate",
            "partial": f"Partial({self.axis})",
            "shard": f"Shard(tokens, {self.axis})",
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
            {(rank,): value} where replicated, else {ranks of the group: value}.

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
            full[group] = self.combine([local[rank] for rank in group], tokens)
        return full

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
        return torch.stack([part.double() for part in parts]).sum(0)


def shard_rows(tokens: int, ranks: int) -> int:
    """Rows of each rank's token shard, padding included: ceil(tokens / ranks)."""
    return -(-tokens // ranks)

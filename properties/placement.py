"""Placements: how the ranks' local values of a tensor make up its full value.

The names are DTensor's. Here they are about the token-by-feature activations between the parts
of a layer: replicated over an axis, or partial sums over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sim import Topology


class PlacementError(ValueError):
    """A placement's text that means nothing, or that the ranks do not agree on."""


@dataclass(frozen=True)
class Placement:
    """Over which axis the full value is the sum of the local ones; replicated over the rest."""

    partial_over: str | None = None

    @classmethod
    def parse(cls, text: str) -> Placement:
        """From a tap's declaration: "replicate" or "partial:AXIS".

        Raises:
            PlacementError: any other text.
        """
        if text == "replicate":
            return cls()
        kind, _, axis = text.partition(":")
        if kind == "partial" and axis in ("tp", "ep", "dp"):
            return cls(axis)
        raise PlacementError(f"{text!r} is no placement; use replicate or partial:tp")

    def __str__(self) -> str:
        return f"Partial({self.partial_over})" if self.partial_over else "Replicate"

    def full_values(
        self, topology: Topology, local: Mapping[int, torch.Tensor]
    ) -> dict[tuple[int, ...], torch.Tensor]:
        """The full value that each set of ranks holds, in float64.

        Args:
            topology: the ranks' layout.
            local: each rank's local value, [T, ...], all of one shape.

        Returns:
            {(rank,): value} where replicated; {ranks of the group: sum} where partial.

        Raises:
            PlacementError: a group has the tap on some of its ranks only.
        """
        if self.partial_over is None:
            return {(rank,): value.double() for rank, value in local.items()}
        full = {}
        for group in topology.groups[self.partial_over]:
            have = [rank for rank in group if rank in local]
            if not have:
                continue
            if len(have) != len(group):
                raise PlacementError(f"ranks {have} of {list(group)} have it, the others do not")
            full[group] = sum_in_float64([local[rank] for rank in group])
        return full


def sum_in_float64(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the parts, in float64 so that it adds no rounding of its own."""
    return torch.stack([part.double() for part in parts]).sum(0)


def explain(
    local: Sequence[torch.Tensor],
    truth: torch.Tensor,
    bound: float,
    placement: Placement,
    axis: str = "tp",
) -> str:
    """What wrong values look like, if they look like something.

    Args:
        local: the local values of the ranks of one group, [T, ...] each, the worst rank first.
        truth: the full value, float64 [T, ...].
        bound: largest error that rounding can explain.
        placement: the placement expected.
        axis: the group's axis.
    """
    size = len(local)
    shape = local[0].shape
    if shape != truth.shape:
        if shape and shape[0] * size == truth.shape[0]:
            return f"looks like Shard(tokens) over {axis}: a gather is missing"
        return f"has shape {list(shape)} instead of {list(truth.shape)}"
    total = sum_in_float64(local)
    value = total if placement.partial_over else local[0].double()
    if not torch.isfinite(value).all():
        rows = _rows(~torch.isfinite(value))
        return f"rows {rows} are not finite: uninitialised or padding rows leaked in"
    if size > 1 and placement.partial_over and all(_near(v.double(), truth, bound) for v in local):
        return f"every rank of {axis} has the full value already: the sum counts it {size} times"
    if size > 1 and not placement.partial_over and _near(total, truth, bound * size):
        return f"looks like Partial({axis}): a reduction over {axis} is missing"
    for times in range(2, size + 1):
        if _near(value, truth * times, bound * times):
            return f"is {times} x the full value: summed over {axis} once too often"
    wrong = _rows((value - truth).abs() > bound)
    if wrong == [row for row in wrong if not value[row].any()]:
        return f"rows {wrong} are zero: they were dropped"
    if len(wrong) < truth.shape[0]:
        return f"only rows {wrong} of {truth.shape[0]} are wrong"
    return "no simple relation to the full value"


def _near(value: torch.Tensor, truth: torch.Tensor, bound: float) -> bool:
    return bool(((value - truth).abs() <= bound).all())


def _rows(wrong: torch.Tensor) -> list[int]:
    flat = wrong.reshape(wrong.shape[0], -1).any(-1)
    return [int(row) for row in flat.nonzero().flatten()]

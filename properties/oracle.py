"""The oracle: each tap of a run against the float64 reference, before and after norms.

A norm hides an error of scale, so the taps of interest lie before norms. The first tap in
program order that is wrong is the diagnosis; what follows from it is not news.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from properties.explain import explain
from properties.placement import Placement, PlacementError
from properties.recogniser_rows import deviation
from sim import Topology


class Captured(Protocol):
    """One tap on one rank: its local value, and how the code itself declares it placed."""

    @property
    def value(self) -> torch.Tensor: ...
    @property
    def declared(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TapVerdict:
    """One tap against the reference."""

    name: str
    ok: bool
    expected: str
    """The placement expected, such as "Replicate" or "Partial(tp)"."""
    max_abs_err: float
    """Largest deviation of any rank (inf where shapes differ or values are not finite)."""
    bound: float
    """Largest deviation that rounding can explain."""
    where: str = ""
    """Ranks and rows, when it is wrong."""
    why: str = ""
    """What the wrong value looks like, when it is wrong."""


def compare_taps(
    topology: Topology,
    captured: Sequence[Mapping[str, Captured]],
    truth: Mapping[str, torch.Tensor],
    bounds: Mapping[str, float],
    bases: Mapping[str, torch.Tensor] | None = None,
) -> list[TapVerdict]:
    """Compare every tap that the reference knows, in program order.

    Args:
        topology: the ranks' layout.
        captured: the taps of each rank, by rank, each in program order.
        truth: the reference's taps, float64 [T, ...], in program order.
        bounds: for each tap the largest error that rounding can explain.
        bases: for taps that are a sum with a layer's output, the rest of the sum, [T, ...].
    """
    verdicts = []
    for name, expected in truth.items():
        local = {rank: taps[name] for rank, taps in enumerate(captured) if name in taps}
        base = (bases or {}).get(name)
        verdicts.append(_compare(name, topology, local, expected, bounds[name], base))
    return verdicts


def _compare(
    name: str,
    topology: Topology,
    local: Mapping[int, Captured],
    truth: torch.Tensor,
    bound: float,
    base: torch.Tensor | None,
) -> TapVerdict:
    if not local:
        return TapVerdict(
            name=name,
            ok=False,
            expected="on some rank",
            max_abs_err=float("inf"),
            bound=bound,
            where="all ranks",
            why="no rank has it: the module it is taken from did not run",
        )
    declared = sorted({tap.declared for tap in local.values()})
    values = {rank: tap.value for rank, tap in local.items()}
    infinite = float("inf")
    if len(declared) > 1:
        return TapVerdict(
            name=name,
            ok=False,
            expected=" or ".join(str(Placement.parse(text)) for text in declared),
            max_abs_err=infinite,
            bound=bound,
            where=f"ranks {sorted(local)}",
            why="the ranks declare different placements",
        )
    placement = Placement.parse(declared[0])
    axis = placement.axis
    try:
        full = placement.full_values(topology, values, truth.shape[0])
    except PlacementError as error:
        parts = _badly_placed(placement, topology, values, truth.shape[0])
        return TapVerdict(
            name=name,
            ok=False,
            expected=str(placement),
            max_abs_err=infinite,
            bound=bound,
            where=f"ranks {sorted(values)}",
            why=explain(parts, truth, bound, placement) if parts else str(error),
        )
    worst_ranks, worst = max(
        ((ranks, _deviation(value, truth)) for ranks, value in full.items()),
        key=lambda pair: pair[1],
    )
    if worst <= bound:
        return TapVerdict(
            name=name, ok=True, expected=str(placement), max_abs_err=worst, bound=bound
        )
    group = [r for r in topology.group_of(worst_ranks[0], axis) if r in values]
    return TapVerdict(
        name=name,
        ok=False,
        expected=str(placement),
        max_abs_err=worst,
        bound=bound,
        where=_where(placement, worst_ranks, full[worst_ranks], truth, bound),
        why=explain(
            [values[rank] for rank in group],
            truth,
            bound,
            placement,
            worst=group.index(worst_ranks[0]),
            base=base,
        ),
    )


def _badly_placed(
    placement: Placement, topology: Topology, values: Mapping[int, torch.Tensor], tokens: int
) -> list[torch.Tensor]:
    """The local values of the first group that cannot be combined, or [] if ranks lack theirs."""
    for group in topology.groups[placement.axis]:
        parts = [values[rank] for rank in group if rank in values]
        if 0 < len(parts) < len(group):
            return []
        try:
            placement.combine(parts, tokens)
        except PlacementError:
            return parts
    return []


def _deviation(value: torch.Tensor, truth: torch.Tensor) -> float:
    """`deviation`, of values whose shapes may differ: inf then."""
    return deviation(value, truth.double()) if value.shape == truth.shape else float("inf")


def _where(
    placement: Placement,
    ranks: tuple[int, ...],
    value: torch.Tensor,
    truth: torch.Tensor,
    bound: float,
) -> str:
    how = {"replicate": "", "partial": "the sum over ", "shard": "the shards of "}[placement.kind]
    who = how + (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}")
    if value.shape != truth.shape:
        return who
    wrong = ~((value - truth).abs().reshape(truth.shape[0], -1) <= bound).all(-1)
    rows = [int(row) for row in wrong.nonzero().flatten()]
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"{who}, rows {shown} of {truth.shape[0]}"

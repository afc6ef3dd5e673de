"""How far every tap is from its truth, all taps at once.

Almost all taps of almost all runs are right, and a comparison on its own costs many times its
arithmetic. So the values of all taps are laid end to end and compared together; only those that
are off are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from properties.captured import Captured
from properties.placement import Placement, PlacementError
from sim import Topology
from sim.buffers import same_bits


def largest_deviations(
    topology: Topology,
    captured: Sequence[Mapping[str, Captured]],
    truth: Mapping[str, torch.Tensor],
) -> dict[str, tuple[Placement, float]]:
    """For each tap its placement and the largest deviation of any rank's full value.

    Left out are taps that no rank has, whose ranks declare different placements, or whose local
    values cannot be placed so or make up another shape than the truth's.

    Args:
        topology: the ranks' layout.
        captured: the taps of each rank, by rank.
        truth: what they have to be, [T, ...].
    """
    placements: dict[str, Placement] = {}
    names: list[str] = []
    values: list[torch.Tensor] = []
    for name, expected in truth.items():
        local = {rank: taps[name] for rank, taps in enumerate(captured) if name in taps}
        declared = {tap.declared for tap in local.values()}
        if len(declared) != 1:
            continue
        placement = Placement.parse(declared.pop())
        full = _full(placement, topology, local, expected.shape[0])
        if full and all(value.shape == expected.shape for value in full):
            placements[name] = placement
            names += [name] * len(full)
            values += full
    worst = dict.fromkeys(placements, 0.0)
    for name, off in zip(names, _deviations(values, [truth[name] for name in names]), strict=True):
        worst[name] = max(worst[name], off)
    return {name: (placement, worst[name]) for name, placement in placements.items()}


def _full(
    placement: Placement, topology: Topology, local: Mapping[int, Captured], tokens: int
) -> list[torch.Tensor]:
    """The different full values that ranks hold; none if theirs do not make one up."""
    values = {rank: tap.value for rank, tap in local.items()}
    if placement.kind == "replicate":
        return _different(values.values())
    try:
        return [*placement.full_values(topology, values, tokens).values()]
    except PlacementError:
        return []


def _different(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The first value, and those with other bits."""
    first, *others = values
    return [first, *(value for value in others if not same_bits(value, first))]


def _deviations(values: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> list[float]:
    """The largest absolute deviation of each value from a truth of its shape; inf where one is not
    a number."""
    found = [0.0] * len(values)
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (value, truth) in enumerate(zip(values, truths, strict=True)):
        if value.numel():
            by_dtype.setdefault((value.dtype, truth.dtype), []).append(i)
    for alike in by_dtype.values():
        have = torch.cat([values[i].reshape(-1) for i in alike]).double()
        due = torch.cat([truths[i].reshape(-1) for i in alike])
        lengths = torch.tensor([values[i].numel() for i in alike])
        off = (have - due.to(have.device)).abs_()
        worst = torch.segment_reduce(off, "max", lengths=lengths.to(off.device))
        for i, largest in zip(alike, worst.tolist(), strict=True):
            found[i] = largest if largest == largest else float("inf")
    return found

"""The topologies that a search covers, from small to large."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from sim import Topology

MOST_RANKS = 8
DEGREES = (1, 2, 4, 8)
"""Degrees that the tiny model divides by."""


def all_topologies(
    stages: Iterable[int] = DEGREES, replicas: Iterable[int] = (1,)
) -> list[Topology]:
    """Every topology up to 8 ranks that the driver runs: TP, PP and DP, with EP where there are
    ranks to spread experts over.

    Args:
        stages: the PP degrees.
        replicas: the DP degrees.
    """
    return sorted(
        (
            Topology(tp=tp, pp=pp, dp=dp, ep=ep)
            for tp, pp, dp, ep in product(DEGREES, stages, replicas, (False, True))
            if tp * pp * dp <= MOST_RANKS and not (ep and tp * dp == 1)
        ),
        key=size,
    )


def size(topology: Topology) -> tuple[int, int, int, bool, str]:
    """How large a topology is: DP ranks, ranks, stages, then whether experts are spread."""
    return topology.dp, topology.world_size, topology.pp, topology.ep, topology.word

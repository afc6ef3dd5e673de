"""Which lane takes a request next."""

from __future__ import annotations

from collections.abc import Sequence

from rankfold.deployment.lane import Lane


def least_loaded(lanes: Sequence[Lane]) -> Lane | None:
    """The free lane with the fewest tokens to run and to hold, the first of equal ones; None if
    none is free."""
    return min((lane for lane in lanes if lane.free), key=lambda lane: lane.load, default=None)

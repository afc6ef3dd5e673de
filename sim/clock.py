"""How much of a run's time the folded transport itself takes, for the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .baton import Baton
from .fabric import Fabric
from .work import FoldedWork


@dataclass
class TransportClock:
    """Seconds spent in the transport by whichever rank ran, hand-overs included.

    Since one rank runs at a time, a run's time minus this is the ranks' own compute.
    """

    seconds: float = 0.0


@contextmanager
def transport_clock() -> Iterator[TransportClock]:
    """Measure the transport of all worlds of this process while the context is open.

    The clock runs from a rank's entry into the transport until some rank leaves it: that is the
    transport's work and the hand-over between threads, with nobody computing meanwhile.
    """
    clock = TransportClock()
    entered = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            entered[0] = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                clock.seconds += time.perf_counter() - entered[0]

        return wrapper

    # A rank's first turn in a run, and its last, are hand-overs too.
    places: list[tuple[Any, str]] = [
        (Fabric, "collective"),
        (Fabric, "post"),
        (FoldedWork, "wait"),
        (Baton, "await_turn"),
        (Baton, "end"),
    ]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, timed(original))
    try:
        yield clock
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)

"""How a launched process ends: in time to say what was wrong.

When one process of a launch ends, torchrun asks the others to end too, within a tenth of a second,
and kills them after 30. The driver needs a moment to notice which rank it was, and to report.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

GRACE = 10.0
"""Seconds after torchrun's request that a process goes on."""
BROKE = 3
"""Exit code of a process that was ended."""


def linger(rank: int, seconds: float = GRACE) -> None:
    """Answer torchrun's request to end only after some seconds. Main thread only."""

    def end() -> None:
        end_now(
            BROKE, "" if rank else "torchrun ends this run, since one of its processes has ended"
        )

    def answer(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, answer)


def end_now(code: int, said: str = "") -> None:
    """End the process whatever its threads are stuck in."""
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

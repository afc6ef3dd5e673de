"""Which of several failed checks a person should read first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from properties import TapVerdict, Verdict


def headline(checks: Sequence[Verdict], taps: Sequence[TapVerdict]) -> Verdict | None:
    """The failed check to read first: what it is about comes first in the program.

    Of checks about the same place, the one that stands first in `checks`: they go from the cause
    to what it does.
    """
    order = {tap.name: i for i, tap in enumerate(taps)}

    def position(verdict: Verdict) -> float:
        if verdict.name == "parameters":
            # Nothing can be right after wrong weights.
            return -1
        if verdict.at in order:
            return order[verdict.at]
        if layer := re.search(r"layers\.\d+", verdict.at):
            # A module of a layer: before all taps of the layer.
            within = layer.group() + "."
            return next((i for name, i in order.items() if name.startswith(within)), len(order))
        return len(order)

    failed = [check for check in checks if not check.ok]
    return min(failed, key=position) if failed else None

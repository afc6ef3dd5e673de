"""A schedule: in which order the ranks run, and how late the transport delivers."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Decides everything that a program must not depend on. The same schedule replays the same run.

    Raises:
        ValueError: the seed is no whole number.
    """

    seed: int | None = None
    """The order of the ranks: None resumes them first come, first served; a number draws."""
    late: bool = False
    """Whether the transport delivers as late as it may: see `sim.late`. False: at once."""

    def __post_init__(self) -> None:
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"a schedule's seed is a whole number or None, not {self.seed!r}")

    def __str__(self) -> str:
        order = "plain order" if self.seed is None else f"seed {self.seed}"
        return f"{order}, late delivery" if self.late else order

    def generator(self) -> random.Random | None:
        """Draws the order of one run; None for the plain one."""
        return None if self.seed is None else random.Random(self.seed)

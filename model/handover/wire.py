"""What carries the pieces of hand-overs. It can be told to lose, repeat, delay and reorder them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from model.handover.transfer import Piece


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """How often what goes wrong; chances of 0 to 1."""

    seed: int = 0
    lost: float = 0.1
    """That a piece does not arrive."""
    cut: float = 0.1
    """That a round loses everything that is under way."""
    repeated: float = 0.15
    """That a piece arrives again later."""
    late: float = 0.3
    """That a piece takes a round more."""
    unheard: float = 0.1
    """That the sender does not hear that a piece has arrived."""
    restarted: float = 0.1
    """That a hand-over is given up half way and its request prefilled again."""


@dataclass(kw_only=True)
class Carried:
    """Counts of pieces."""

    sent: int = 0
    bytes: int = 0
    lost: int = 0
    repeated: int = 0
    late: int = 0


class Wire:
    """Carries pieces from round to round; at once and in order unless it is disturbed."""

    def __init__(self, disturbance: Disturbance | None = None) -> None:
        self.carried = Carried()
        self._disturbance = disturbance
        self._chance = random.Random(disturbance.seed if disturbance else 0)
        self._under_way: list[Piece] = []

    def send(self, pieces: Iterable[Piece]) -> None:
        """Put pieces on their way."""
        for piece in pieces:
            self.carried.sent += 1
            self.carried.bytes += piece.values.nbytes
            self._under_way.append(piece)

    def deliver(self) -> list[Piece]:
        """What arrives in this round, in the order of its arrival."""
        under_way, self._under_way = self._under_way, []
        wrong = self._disturbance
        if wrong is None:
            return under_way
        if under_way and self._happens(wrong.cut):
            self.carried.lost += len(under_way)
            return []
        arriving = []
        for piece in under_way:
            if self._happens(wrong.lost):
                self.carried.lost += 1
            elif self._happens(wrong.late):
                self.carried.late += 1
                self._under_way.append(piece)
            else:
                arriving.append(piece)
                if self._happens(wrong.repeated):
                    self.carried.repeated += 1
                    self._under_way.append(piece)
        self._chance.shuffle(arriving)
        return arriving

    def hears(self) -> bool:
        """Whether the sender hears that a piece has arrived."""
        return self._disturbance is None or not self._happens(self._disturbance.unheard)

    def gives_up(self) -> bool:
        """Whether a hand-over that has begun is given up."""
        return self._disturbance is not None and self._happens(self._disturbance.restarted)

    @property
    def empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def _happens(self, chance: float) -> bool:
        return self._chance.random() < chance

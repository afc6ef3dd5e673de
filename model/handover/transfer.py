"""One request's hand-over: what is to come, what has arrived, and what of it counts.

The wire may lose pieces, bring them twice, late, or in any order. So the receiver takes each cell
once, and only of the attempt that it waits for; the sender sends a cell again until the receiver
has said that it has it, and keeps its caches until all are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from model.handover.cells import Cell


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A cell on its way."""

    request: int
    attempt: int
    """How often the request had been prefilled before."""
    slot: int
    """Where the receiver had room for the request when it was sent."""
    cell: Cell
    values: torch.Tensor
    """[tokens, features]"""


class Arrival(Enum):
    """What became of a piece that arrived."""

    TAKEN = "taken"
    REPEATED = "repeated"
    STALE = "of an attempt that was given up"


@dataclass(kw_only=True)
class Transfer:
    """One attempt to hand a request over."""

    request: int
    attempt: int
    slot: int
    """Where the receiver has room for the request."""
    cells: Sequence[Cell]
    arrived: set[Cell] = field(default_factory=set)
    confirmed: set[Cell] = field(default_factory=set)
    """What the sender knows to have arrived."""

    def arrive(self, piece: Piece) -> Arrival:
        """Say what a piece is; one that is TAKEN has to be written to the caches."""
        if (piece.request, piece.attempt) != (self.request, self.attempt):
            return Arrival.STALE
        if piece.cell in self.arrived:
            return Arrival.REPEATED
        self.arrived.add(piece.cell)
        return Arrival.TAKEN

    def confirm(self, cells: Iterable[Cell]) -> None:
        """Tell the sender that these have arrived."""
        self.confirmed.update(cells)

    @property
    def released(self) -> bool:
        """Whether the sender may give its caches up."""
        return len(self.confirmed) == len(self.cells)

    @property
    def unconfirmed(self) -> list[Cell]:
        """What the sender has to send, or to send again."""
        return [cell for cell in self.cells if cell not in self.confirmed]

    @property
    def missing(self) -> list[Cell]:
        """What has not arrived."""
        return [cell for cell in self.cells if cell not in self.arrived]

    @property
    def whole(self) -> bool:
        """Whether the receiver has everything, and may decode."""
        return len(self.arrived) == len(self.cells)


def slot_of(piece: Piece, transfer: Transfer | None) -> int | None:
    """Where a piece is to be written; None if it is not to be.

    transfer: of the piece's request, if one is under way. It then knows that the piece has arrived.
    """
    if transfer is None or transfer.arrive(piece) is not Arrival.TAKEN:
        return None
    return transfer.slot

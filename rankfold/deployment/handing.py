"""The hand-overs that are under way between lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from model.handover import cells, transfer
from model.handover.cells import Cell
from model.handover.transfer import Piece, Transfer
from model.handover.wire import Disturbance, Wire
from properties.handover import Content
from rankfold.deployment.lane import Course, Lane
from rankfold.deployment.worker import Worker
from rankfold.rank_programs import (
    Slice,
    cache_contents,
    hold_request,
    read_caches,
    write_caches,
)

PIECE = 5
"""Most tokens of a piece: no multiple of a page, so that pieces end within pages."""
PATIENCE = 3
"""Rounds after which the sender sends again what it has not heard of."""


@dataclass(kw_only=True, eq=False)
class HandOver:
    """One attempt to hand a request over."""

    transfer: Transfer
    sender: Course
    receiver: Course
    source: tuple[Worker, Lane]
    target: tuple[Worker, Lane]
    rounds: int = 0
    begun: bool = False
    """Whether the receiver decodes."""


@dataclass(kw_only=True)
class Counts:
    """What became of hand-overs and of their pieces."""

    whole: int = 0
    given_up: int = 0
    taken: int = 0
    repeated: int = 0
    stale: int = 0


@dataclass(kw_only=True)
class Ended:
    """What a round has ended."""

    begun: list[HandOver] = field(default_factory=list)
    """The receiver has everything and may decode."""
    given_up: list[HandOver] = field(default_factory=list)
    """The request has to be prefilled again."""


class Handing:
    """All hand-overs of a deployment."""

    def __init__(self, disturbance: Disturbance | None) -> None:
        self.wire = Wire(disturbance)
        self.counts = Counts()
        self.contents: list[tuple[HandOver, list[Content]]] = []
        """What both sides held when a hand-over was whole."""
        self._open: dict[int, HandOver] = {}
        self._targets: dict[tuple[int, int], Worker] = {}
        """Where the pieces of each attempt go."""

    def open(
        self,
        sender: Course,
        receiver: Course,
        source: tuple[Worker, Lane],
        target: tuple[Worker, Lane],
    ) -> None:
        """Begin to hand a request over."""
        (giver, first), (taker, last) = source, target
        needed = cells.cells_of(sender.prompt, giver.held_by(first), taker.held_by(last), PIECE)
        self._targets[sender.request, sender.attempt] = taker
        self._open[sender.request] = HandOver(
            transfer=Transfer(
                request=sender.request, attempt=sender.attempt, slot=receiver.slot, cells=needed
            ),
            sender=sender,
            receiver=receiver,
            source=source,
            target=target,
        )

    @property
    def under_way(self) -> list[HandOver]:
        """In the order in which they began."""
        return list(self._open.values())

    def round(self) -> Ended:
        """Send what is due, and take what arrives."""
        self._send()
        self._take(self.wire.deliver())
        ended = Ended()
        # Of these the sender knows that everything is there, and needs its caches no more.
        closed = []
        for hand in self.under_way:
            hand.rounds += 1
            if hand.transfer.whole and not hand.begun:
                self._begin(hand)
                ended.begun.append(hand)
            if hand.transfer.released:
                closed.append(hand)
            elif hand.rounds == 1 and not hand.begun and self.wire.gives_up():
                ended.given_up.append(hand)
        for hand in closed:
            self._close(hand)
            self.counts.whole += 1
        for hand in ended.given_up:
            self._close(hand)
            worker, lane = hand.target
            worker.free(lane, hand.receiver)
            self.counts.given_up += 1
        return ended

    def _send(self) -> None:
        """Read what is to be sent, once for each worker that sends."""
        for worker in _distinct(hand.source[0] for hand in self.under_way):
            due = [
                (hand, cell)
                for hand in self.under_way
                if hand.source[0] is worker and hand.rounds % PATIENCE == 0
                for cell in hand.transfer.unconfirmed
            ]
            if not due:
                continue
            values = _read(worker, [(hand.sender.slot, cell, cell.source) for hand, cell in due])
            self.wire.send(
                Piece(
                    request=hand.sender.request,
                    attempt=hand.sender.attempt,
                    slot=hand.transfer.slot,
                    cell=cell,
                    values=value,
                )
                for (hand, cell), value in zip(due, values, strict=True)
            )

    def _take(self, pieces: Iterable[Piece]) -> None:
        """Write what counts, once for each worker that receives."""
        given: dict[int, tuple[Worker, dict[int, list[tuple[Slice, torch.Tensor]]]]] = {}
        for piece in pieces:
            hand = self._open.get(piece.request)
            of = None if hand is None else hand.transfer
            slot = transfer.slot_of(piece, of)
            if slot is not None:
                self.counts.taken += 1
                worker = self._targets[piece.request, piece.attempt]
                of_worker = given.setdefault(id(worker), (worker, {}))[1]
                part = slice_of(piece.cell, slot)
                of_worker.setdefault(piece.cell.target, []).append((part, piece.values))
            elif of is not None and of.attempt == piece.attempt:
                self.counts.repeated += 1
            else:
                self.counts.stale += 1
            if of is not None and of.attempt == piece.attempt and self.wire.hears():
                of.confirm([piece.cell])
        for worker, by_rank in given.values():
            worker.call(write_caches, by_rank)

    def _begin(self, hand: HandOver) -> None:
        """Let the receiver decode. As in vLLM, it runs the last prompt token again, whose logits
        it needs; so that token's keys and values are its own."""
        self.contents.append((hand, contents_of(hand)))
        hand.begun = True
        worker, lane = hand.target
        known = hand.receiver.prompt - 1
        worker.call(hold_request, lane.dp_rank, hand.receiver.slot, known)
        hand.receiver.fed, hand.receiver.ready = known, True

    def _close(self, hand: HandOver) -> None:
        """End it, and have the sender give up its caches."""
        del self._open[hand.sender.request]
        worker, lane = hand.source
        worker.free(lane, hand.sender)


def slice_of(cell: Cell, slot: int) -> Slice:
    """A cell in the caches of a rank that has a request in a slot."""
    return Slice(slot=slot, layer=cell.layer, head=cell.head, start=cell.start, stop=cell.stop)


def contents_of(hand: HandOver) -> list[Content]:
    """What both sides hold of each head on each rank of the receiver, read anew and by another way
    than it was handed over: for each head on the first rank of the sender that has it."""
    tokens = hand.sender.prompt
    held = {}
    for end, course in ((hand.source, hand.sender), (hand.target, hand.receiver)):
        worker, lane = end
        found = worker.call(cache_contents, lane.dp_rank, course.slot, tokens)
        held[id(worker)] = [
            (rank, of.layer, head, found[rank][of.layer][:, place])
            for rank, of_rank in worker.held_by(lane).items()
            for of in of_rank
            for place, head in enumerate(of.heads)
        ]
    sent: dict[tuple[str, int], torch.Tensor] = {}
    for _, layer, head, values in held[id(hand.source[0])]:
        sent.setdefault((layer, head), values)
    return [
        Content(layer=layer, head=head, rank=rank, sent=sent[layer, head], received=values)
        for rank, layer, head, values in held[id(hand.target[0])]
        if (layer, head) in sent
    ]


def _read(worker: Worker, wanted: list[tuple[int, Cell, int]]) -> list[torch.Tensor]:
    """What the caches of (slot, cell, rank) hold, in their order."""
    by_rank: dict[int, list[Slice]] = {}
    places = []
    for slot, cell, rank in wanted:
        of_rank = by_rank.setdefault(rank, [])
        places.append((rank, len(of_rank)))
        of_rank.append(slice_of(cell, slot))
    values = worker.call(read_caches, by_rank)
    return [values[rank][place] for rank, place in places]


def _distinct(workers: Iterable[Worker]) -> list[Worker]:
    return list({id(worker): worker for worker in workers}.values())

"""Faults of hand-overs: KV caches that go from the ranks that prefill to those that decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from model.handover import cells, layout, transfer
from model.handover.cells import Cell
from model.handover.layout import Held
from model.handover.transfer import Piece, Transfer
from properties.faults.fault import Fault
from properties.faults.patches import Method, replaced, wrapped

_PAGE = 4
"""Tokens of a page of the tiny model's caches."""


@dataclass(frozen=True, kw_only=True)
class HandOverFault(Fault):
    """A fault that takes workers that prefill and workers that decode: `shows` has the words of
    deployments, such as 1p1d-tp2-tp4."""

    requests: int = 6
    """So many are served."""


@contextmanager
def _of_cells(change: Callable[[list[Cell]], list[Cell]]) -> Iterator[None]:
    """Hand-overs go by other cells than they have to."""

    def changed(own: Method) -> Method:
        def cells_of(*args: Any, **kwargs: Any) -> list[Cell]:
            return change(own(*args, **kwargs))

        return cells_of

    with wrapped(cells, "cells_of", changed):
        yield


@contextmanager
def last_page_left() -> Iterator[None]:
    """Whole pages are handed over; the tokens of the last one, which is not full, are not."""

    def whole(own: Method) -> Method:
        def cells_of(tokens: int, *args: Any) -> list[Cell]:
            return own(tokens // _PAGE * _PAGE, *args)  # type: ignore[no-any-return]

        return cells_of

    with wrapped(cells, "cells_of", whole):
        yield


@contextmanager
def indexer_left() -> Iterator[None]:
    """The indexers' keys are not handed over."""
    with _of_cells(lambda found: [cell for cell in found if "index" not in cell.layer]):
        yield


@contextmanager
def last_token_of_pieces_left() -> Iterator[None]:
    """The end of a piece is taken for its last token."""

    def shorter(found: list[Cell]) -> list[Cell]:
        return [replace(cell, stop=cell.stop - 1) for cell in found if cell.stop - cell.start > 1]

    with _of_cells(shorter):
        yield


@contextmanager
def first_dp_rank_alone() -> Iterator[None]:
    """Everything goes to the first ranks of the decoding world, whose DP rank it is not."""

    def first(own: Method) -> Method:
        def cells_of(
            tokens: int,
            sources: Mapping[int, Sequence[Held]],
            targets: Mapping[int, Sequence[Held]],
            piece: int,
        ) -> list[Cell]:
            base = min(targets)
            found: list[Cell] = own(tokens, sources, targets, piece)
            return [replace(cell, target=cell.target - base) for cell in found]

        return cells_of

    with wrapped(cells, "cells_of", first):
        yield


@contextmanager
def heads_in_turns() -> Iterator[None]:
    """Where there are more ranks than heads, rank r is taken to have head r modulo their number;
    vLLM has each head on ranks beside each other."""

    def turns(own: Method) -> Method:
        def heads_of(total: int, tp: int, tp_rank: int) -> tuple[int, ...]:
            return (tp_rank % total,) if tp > total else own(total, tp, tp_rank)

        return heads_of

    with wrapped(layout, "heads_of", turns):
        yield


@contextmanager
def first_head_read() -> Iterator[None]:
    """A head is read at the same place on both sides, whatever heads each has."""

    with replaced(Held, "place", lambda self, head: 0):
        yield


@contextmanager
def layers_of_a_stage() -> Iterator[None]:
    """Each stage that prefills counts its layers from 0."""

    def counted(own: Method) -> Method:
        def held_by(caches: Any, tiny: Any, topology: Any, rank: int) -> tuple[Held, ...]:
            held: tuple[Held, ...] = own(caches, tiny, topology, rank)
            numbers = sorted({_number(each.layer) for each in held})
            return tuple(
                replace(each, layer=_renumbered(each.layer, numbers.index(_number(each.layer))))
                for each in held
            )

        return held_by

    with wrapped(layout, "held_by", counted):
        yield


@contextmanager
def repeats_counted() -> Iterator[None]:
    """What has arrived is counted in pieces, those that came twice among them."""
    arrivals: dict[int, int] = {}

    def counting(own: Method) -> Method:
        def arrive(self: Transfer, piece: Piece) -> Any:
            found = own(self, piece)
            if found is not transfer.Arrival.STALE:
                arrivals[id(self)] = arrivals.get(id(self), 0) + 1
            return found

        return arrive

    def enough(self: Transfer) -> bool:
        return arrivals.get(id(self), 0) >= len(self.cells)

    with wrapped(Transfer, "arrive", counting), replaced(Transfer, "whole", property(enough)):
        yield


@contextmanager
def decode_begins_early() -> Iterator[None]:
    """Decoding begins with the first piece that arrives."""
    early = property(lambda self: bool(self.arrived) or not self.cells)
    with replaced(Transfer, "whole", early):
        yield


@contextmanager
def stale_pieces_written() -> Iterator[None]:
    """Pieces that come after their hand-over has ended are written where it had room, which
    another request may have by now: what a one-sided write does that nobody waits for."""

    def written(own: Method) -> Method:
        def slot_of(piece: Piece, of: Transfer | None) -> int | None:
            slot: int | None = own(piece, of)
            stale = of is None or of.attempt != piece.attempt
            return piece.slot if stale else slot

        return slot_of

    with wrapped(transfer, "slot_of", written):
        yield


@contextmanager
def released_when_sent() -> Iterator[None]:
    """The sender gives its caches up when it has sent everything once, whatever has arrived."""
    with replaced(Transfer, "released", property(lambda self: True)):
        yield


def _number(layer: str) -> int:
    return int(layer.split(".layers.")[1].split(".")[0])


def _renumbered(layer: str, number: int) -> str:
    before, _, after = layer.partition(".layers.")
    return f"{before}.layers.{number}.{after.partition('.')[2]}"


def handover_fault(name: str, **fields: Any) -> HandOverFault:
    """A fault of hand-overs, whose names begin alike."""
    fields.setdefault("report", "seed 2, hand-over of KV caches (S2-1)")
    return HandOverFault(name=f"handover-{name}", **fields)


FAULTS: tuple[HandOverFault, ...] = (
    handover_fault(
        "last-page-left",
        mechanism="whole pages are handed over, and the tokens of the last one are not",
        apply=last_page_left,
        shows=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("model.layers.0",),
    ),
    handover_fault(
        "indexer-left",
        mechanism="keys and values are handed over, and the indexers' keys are not",
        apply=indexer_left,
        shows=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("indexer", "index"),
    ),
    handover_fault(
        "last-token-of-pieces-left",
        mechanism="the end of a piece is taken for its last token",
        apply=last_token_of_pieces_left,
        shows=("1p1d-tp1-tp1",),
        kinds=("missing",),
        at=("model.layers.0",),
    ),
    handover_fault(
        "first-dp-rank-alone",
        mechanism="every request's caches go to the first DP rank",
        apply=first_dp_rank_alone,
        shows=("1p1d-tp1-dep2",),
        hides=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("model.layers.0",),
    ),
    handover_fault(
        "heads-in-turns",
        mechanism="heads that are repeated are taken to lie in turns over the TP ranks",
        apply=heads_in_turns,
        shows=("1p1d-tp1-tp8",),
        hides=("1p1d-tp1-tp4",),
        kinds=("wrong values", "wrong heads"),
        at=("layers.0.attn",),
    ),
    handover_fault(
        "first-head-read",
        mechanism="a head is looked for at the first place, whichever heads a rank has",
        apply=first_head_read,
        shows=("1p1d-tp1-tp4",),
        hides=("1p1d-tp4-tp4",),
        kinds=("wrong heads", "wrong values"),
        at=("layers.0",),
    ),
    handover_fault(
        "layers-of-a-stage",
        mechanism="each stage that prefills counts its layers from 0",
        apply=layers_of_a_stage,
        shows=("1p1d-pp2-tp1",),
        hides=("1p1d-tp2-tp1",),
        kinds=("wrong layer", "missing"),
        at=("layers", "requests"),
    ),
    handover_fault(
        "repeats-counted",
        mechanism="pieces that come twice are counted twice, so decoding begins too early",
        apply=repeats_counted,
        shows=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("model.layers",),
    ),
    handover_fault(
        "decode-begins-early",
        mechanism="decoding begins with the first piece that arrives",
        apply=decode_begins_early,
        shows=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("model.layers",),
    ),
    handover_fault(
        "stale-pieces-written",
        mechanism="pieces that come after their hand-over has ended are written where it had room",
        apply=stale_pieces_written,
        shows=("1p1d-tp1-dep2",),
        kinds=("stale", "unknown", "wrong values"),
        at=("model.layers", "layers."),
        requests=24,
    ),
    handover_fault(
        "released-when-sent",
        mechanism="the sender gives its caches up before all has arrived",
        apply=released_when_sent,
        shows=("1p1d-tp1-tp2",),
        kinds=("missing",),
        at=("requests", "model.layers"),
    ),
)

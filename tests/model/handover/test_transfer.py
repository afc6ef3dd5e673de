"""A hand-over over a wire that loses, repeats, delays and reorders: nothing lost, nothing twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model.handover.cells import Cell
from model.handover.transfer import Arrival, Piece, Transfer, slot_of
from model.handover.wire import Disturbance, Wire

MOST_ROUNDS = 500


def cells(count: int) -> list[Cell]:
    return [
        Cell(target=0, layer="layers.0.attn", head=0, start=i, stop=i + 1, source=0)
        for i in range(count)
    ]


def transfer(count: int, attempt: int = 0) -> Transfer:
    return Transfer(request=3, attempt=attempt, slot=attempt, cells=cells(count))


def piece(cell: Cell, attempt: int = 0) -> Piece:
    values = torch.full((1, 2), float(cell.start))
    return Piece(request=3, attempt=attempt, slot=attempt, cell=cell, values=values)


@given(
    count=st.integers(1, 20),
    seed=st.integers(0, 1000),
    chances=st.tuples(*[st.sampled_from([0.0, 0.2, 0.6])] * 5),
)
def test_whatever_the_wire_does_each_cell_is_taken_once(
    count: int, seed: int, chances: tuple[float, ...]
) -> None:
    lost, cut, repeated, late, unheard = chances
    wire = Wire(
        Disturbance(seed=seed, lost=lost, cut=cut, repeated=repeated, late=late, unheard=unheard)
    )
    whole, taken = transfer(count), []
    for _ in range(MOST_ROUNDS):
        wire.send(piece(cell) for cell in whole.unconfirmed)
        for arrived in wire.deliver():
            if slot_of(arrived, whole) is not None:
                taken.append(arrived.cell)
            if wire.hears():
                whole.confirm([arrived.cell])
        assert whole.whole == (len(taken) == count)
        assert not whole.released or whole.whole
        if whole.released:
            break
    assert sorted(taken) == whole.cells
    assert whole.missing == []


def test_a_piece_of_an_attempt_that_was_given_up_is_not_taken() -> None:
    second = transfer(2, attempt=1)
    old = piece(second.cells[0], attempt=0)
    assert second.arrive(old) is Arrival.STALE and slot_of(old, second) is None
    assert slot_of(old, None) is None
    assert second.missing == second.cells
    assert slot_of(piece(second.cells[0], attempt=1), second) == 1
    assert second.arrive(piece(second.cells[0], attempt=1)) is Arrival.REPEATED


def test_the_sender_keeps_its_caches_until_it_has_heard_of_everything() -> None:
    one = transfer(2)
    for cell in one.cells:
        assert slot_of(piece(cell), one) == 0
    assert one.whole and not one.released and one.unconfirmed == one.cells
    one.confirm(one.cells[:1])
    assert not one.released and one.unconfirmed == one.cells[1:]
    one.confirm(one.cells)
    assert one.released


def test_an_undisturbed_wire_brings_everything_at_once_and_in_order() -> None:
    wire, sent = Wire(), [piece(cell) for cell in cells(9)]
    wire.send(sent)
    assert wire.deliver() == sent and wire.empty and wire.deliver() == []
    assert (wire.carried.sent, wire.carried.bytes) == (9, 9 * 8)
    assert wire.hears() and not wire.gives_up()


@given(seed=st.integers(0, 200))
def test_the_wire_invents_nothing_and_counts_what_it_loses(seed: int) -> None:
    wire = Wire(Disturbance(seed=seed))
    sent = [piece(cell) for cell in cells(12)]
    wire.send(sent)
    arrived = [p for _ in range(200) for p in wire.deliver()]
    assert wire.empty
    assert all(any(p is each for each in sent) for p in arrived)
    assert len(arrived) == len(sent) + wire.carried.repeated - wire.carried.lost


def test_the_same_seed_disturbs_alike() -> None:
    def run() -> list[list[int]]:
        wire = Wire(Disturbance(seed=5))
        wire.send(piece(cell) for cell in cells(12))
        return [[p.cell.start for p in wire.deliver()] for _ in range(20)]

    assert run() == run()

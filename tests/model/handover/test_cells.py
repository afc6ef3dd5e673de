"""What goes from which rank to which: everything that is needed, once, from a rank that has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.handover.cells import Cell, HandOverError, cells_of
from model.handover.layout import Held, heads_of

HEADS = 4


def held(tp: int, pp: int = 1, first: int = 0) -> dict[int, tuple[Held, ...]]:
    """What the ranks of TP x PP hold of four layers, with an indexer in each."""
    each = 4 // pp
    return {
        first + stage * tp + rank: tuple(
            one
            for layer in range(stage * each, (stage + 1) * each)
            for one in (
                Held(layer=f"layers.{layer}.attn", heads=heads_of(HEADS, tp, rank)),
                Held(layer=f"layers.{layer}.index", heads=(0,)),
            )
        )
        for stage in range(pp)
        for rank in range(tp)
    }


@given(
    tokens=st.integers(1, 23),
    piece=st.integers(1, 9),
    source=st.sampled_from([1, 2, 4, 8]),
    target=st.sampled_from([1, 2, 4, 8]),
    stages=st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 2)]),
)
def test_every_token_of_every_head_goes_once_to_every_rank_that_needs_it(
    tokens: int, piece: int, source: int, target: int, stages: tuple[int, int]
) -> None:
    sources, targets = held(source, stages[0]), held(target, stages[1], first=32)
    found = cells_of(tokens, sources, targets, piece)
    went = [(c.target, c.layer, c.head, at) for c in found for at in range(c.start, c.stop)]
    needed = [
        (rank, each.layer, head, at)
        for rank, of_rank in targets.items()
        for each in of_rank
        for head in each.heads
        for at in range(tokens)
    ]
    assert sorted(went) == sorted(needed)
    for cell in found:
        assert any(
            each.layer == cell.layer and cell.head in each.heads for each in sources[cell.source]
        )
        assert 1 <= cell.stop - cell.start <= piece


def test_no_copy_of_a_repeated_head_goes_unread() -> None:
    found = cells_of(1, held(8), held(8), 4)
    assert {cell.source for cell in found} == set(range(8))


def test_what_nobody_has_is_said() -> None:
    sources = {0: (Held(layer="layers.0.attn", heads=(0,)),)}
    targets = {5: (Held(layer="layers.0.attn", heads=(0, 1)),)}
    with pytest.raises(HandOverError, match=r"rank 5 needs head 1 of layers.0.attn; none"):
        cells_of(3, sources, targets, 4)


@pytest.mark.parametrize(
    ("tp", "heads"),
    [
        (1, [(0, 1, 2, 3)]),
        (2, [(0, 1), (2, 3)]),
        (4, [(0,), (1,), (2,), (3,)]),
        (8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
    ],
)
def test_the_heads_of_a_rank(tp: int, heads: list[tuple[int, ...]]) -> None:
    """As vLLM's QKVParallelLinear shards and repeats them."""
    assert [heads_of(HEADS, tp, rank) for rank in range(tp)] == heads


def test_a_cell_is_readable() -> None:
    cell = Cell(target=3, layer="layers.0.attn", head=1, start=4, stop=8, source=2)
    assert str(cell) == "tokens 4 to 7 of head 1 of layers.0.attn from rank 2 to rank 3"

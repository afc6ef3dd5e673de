"""Batches that are made from one, and the rows of theirs that mean the same.

What has to hold between their runs is in `properties.metamorphic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from model.batch import Batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Relation:
    """Batches made from one, and which of their rows mean what a row of that one means."""

    change: str
    """What was done to the batch, to go after "when"."""
    base: Batch
    derived: tuple[Batch, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    """For each derived batch the pairs (row of the base, row of the derived batch)."""
    in_place: bool
    """Whether every row stays where it is, in a batch of the same shape."""


def tokens_changed(batch: Batch, row: int, vocab: int) -> Relation:
    """The tokens from `row` to the end of its sequence are other ones.

    From the first row of a sequence: the other sequences must not notice. From a later one, also
    the sequence's own earlier rows must not: they cannot see the future.

    Raises ValueError if there is no such row, or no other token.
    """
    if not 0 <= row < batch.tokens or vocab < 2:
        raise ValueError(f"row {row} of {batch.tokens}, {vocab} ids: name a row, of 2 ids or more")
    end = next(stop for start, stop in spans(batch) if start <= row < stop)
    ids = batch.token_ids.clone()
    ids[row:end] = (ids[row:end] + 1) % vocab
    kept = tuple((r, r) for r in range(batch.tokens) if not row <= r < end)
    return Relation(
        change=f"the tokens of rows {row} to {end - 1} change",
        base=batch,
        derived=(Batch(token_ids=ids, positions=batch.positions, seq_lens=batch.seq_lens),),
        rows=(kept,),
        in_place=True,
    )


def sequences_reordered(batch: Batch, order: Sequence[int]) -> Relation:
    """The sequences come in another order.

    Raises ValueError if `order` does not name each sequence once.
    """
    if sorted(order) != list(range(len(batch.seq_lens))):
        raise ValueError(f"order {list(order)} must name each of {len(batch.seq_lens)} sequences")
    derived, rows = _taken(batch, order)
    change = f"the sequences come in the order {list(order)}"
    return Relation(change=change, base=batch, derived=(derived,), rows=(rows,), in_place=False)


def batch_split(batch: Batch, at: int) -> Relation:
    """The sequences before `at` go in one step, the others in a second one.

    Raises ValueError if a step would have no sequence.
    """
    sequences = len(batch.seq_lens)
    if not 0 < at < sequences:
        raise ValueError(f"{sequences} sequences cannot be split at {at}: use 1 to one less")
    parts = [_taken(batch, range(at)), _taken(batch, range(at, sequences))]
    return Relation(
        change=f"sequences from {at} on go in a step of their own",
        base=batch,
        derived=tuple(derived for derived, _ in parts),
        rows=tuple(rows for _, rows in parts),
        in_place=False,
    )


def spans(batch: Batch) -> Iterator[tuple[int, int]]:
    """The rows of each sequence: first, and one past the last."""
    start = 0
    for length in batch.seq_lens:
        yield start, start + length
        start += length


def _taken(batch: Batch, sequences: Sequence[int]) -> tuple[Batch, tuple[tuple[int, int], ...]]:
    of_sequence = list(spans(batch))
    old = [row for s in sequences for row in range(*of_sequence[s])]
    taken = torch.tensor(old, dtype=torch.int64)
    derived = Batch(
        token_ids=batch.token_ids[taken],
        positions=batch.positions[taken],
        seq_lens=tuple(batch.seq_lens[s] for s in sequences),
    )
    return derived, tuple((row, new) for new, row in enumerate(old))

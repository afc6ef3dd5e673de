"""The metamorphic relations by name, as they are drawn and replayed."""

from __future__ import annotations

from model.batch import Batch
from properties.relations import Relation, batch_split, sequences_reordered, tokens_changed
from rankfold.errors import UsageError

RELATIONS = ("tokens changed", "sequences reordered", "batch split")


def possible(name: str, tokens: int, sequences: int) -> bool:
    """Whether a batch of this size has such a relation: rows to change, or sequences to move."""
    return tokens > 0 if name == RELATIONS[0] else sequences > 1


def relate(name: str, batch: Batch, vocab: int) -> Relation:
    """The relation of this name: of the middle token, of all sequences or of the middle one.

    Raises:
        UsageError: no relation has this name, or the batch is too small for it.
    """
    if name not in RELATIONS:
        raise UsageError(f"relation {name!r}: use {', '.join(RELATIONS)}")
    sequences = len(batch.seq_lens)
    if not possible(name, batch.tokens, sequences):
        raise UsageError(
            f"relation {name!r}: a batch of {batch.tokens} tokens in {sequences} sequences has none"
        )
    if name == RELATIONS[0]:
        return tokens_changed(batch, batch.tokens // 2, vocab)
    if name == RELATIONS[1]:
        # As vLLM orders a batch, sequences of one token stay before the others.
        order = sorted(reversed(range(sequences)), key=lambda i: batch.seq_lens[i] != 1)
        return sequences_reordered(batch, order)
    return batch_split(batch, sequences // 2)

"""The corpus: texts whose reference is computed once, and serves every batch made of their parts.

Attention is causal and nothing else mixes tokens, so in the reference a row depends on the tokens
before it in its own sequence alone: the truth of a batch of prefixes is made of rows of the truth
of the whole texts. The bounds are those of the whole texts: the largest rounding error of any of
their rows, so no smaller than that of a part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

import reference
from model.batch import Batch
from rankfold.options import Options
from rankfold.run import Outcome
from rankfold.serving.drive import Served
from rankfold.serving.truth import Ran, followed, rows_by_step, truths_of, whole_of
from rankfold.truth import (
    Truth,
    choices_of,
    chose_as,
    reference_of,
    rows_of,
    summed_ranks,
    truth_from,
    truth_of,
)

LONGEST = 17
"""Most tokens of a batch: a prime, and 2 TP + 1 at TP 8."""
LENGTHS = (LONGEST, LONGEST // 2, LONGEST // 3)
"""Tokens of the texts: the n-th longest sequence of a batch has no more tokens than the n-th."""


MOST_FOLLOWED = 8
"""Runs of all texts that are kept beside the reference's own, the oldest let go first."""


@functools.cache
def text(number: int, vocab: int) -> tuple[int, ...]:
    """The token ids of a text; the same on every machine. Each DP rank has as many of its own as
    there are LENGTHS."""
    generator = torch.Generator().manual_seed(7919 * (number + 1))
    length = LENGTHS[number % len(LENGTHS)]
    return tuple(torch.randint(vocab, (length,), generator=generator).tolist())


def batch_of(seq_lens: Sequence[int], vocab: int, dp_rank: int = 0) -> tuple[int, ...]:
    """The token ids [T] of sequences of these lengths, each the start of a text of its own.

    Equal texts could give ranks equal shards, by chance; so the longest sequence has the longest
    text, and so on, and DP ranks have other texts.
    """
    first = dp_rank * len(LENGTHS)
    longest_first = sorted(range(len(seq_lens)), key=lambda i: -seq_lens[i])
    number = {sequence: place for place, sequence in enumerate(longest_first)}
    parts = [text(first + number[i], vocab)[:length] for i, length in enumerate(seq_lens)]
    return tuple(token for part in parts for token in part)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The reference of all texts for one set of weights, dtype and number of ranks that sum."""

    texts: tuple[tuple[int, ...], ...]
    ranks: int
    """How many ranks' addends a sum adds."""
    bounds: reference.Bounds
    followed: list[reference.Bounds] = field(default_factory=list, compare=False)
    """Runs of all texts that chose otherwise, as runs did; the latest last."""

    @classmethod
    def of(cls, options: Options, weights: dict[str, torch.Tensor]) -> Corpus:
        """Run the reference on all texts. `options` gives the model, dtype and topology."""
        count, vocab = options.topology.dp * len(LENGTHS), options.tiny.vocab_size
        texts = tuple(text(number, vocab) for number in range(count))
        ranks = summed_ranks(options, options.topology)
        return cls(
            texts=texts, ranks=ranks, bounds=reference_of(options, weights, _whole(texts), ranks)
        )

    def truth(
        self, options: Options, weights: dict[str, torch.Tensor], batch: Batch, outcome: Outcome
    ) -> Truth:
        """The truth of a batch: from the corpus, or computed where it is not made of its texts.

        A run that chose other experts or blocks than the reference may be right (a near tie):
        then the reference follows it.
        """
        rows = self._rows(batch)
        if rows is not None:
            step = Ran(options=options, batch=batch, outcome=outcome, rows=rows)
            bounds = self._bounds(options, weights, [step])
            if bounds is not None:
                return truth_from(options, outcome, rows_of(bounds, rows))
        return truth_of(options, weights, batch, outcome)

    def truths(
        self, options: Options, weights: dict[str, torch.Tensor], served: Served
    ) -> list[Truth]:
        """The truth of each step of a run in steps, likewise."""
        whole = self._rows(whole_of(served))
        if whole is not None:
            ran = zip(rows_by_step(served), served.batches, served.outcomes, strict=True)
            steps = [
                Ran(options=options, batch=batch, outcome=outcome, rows=whole[rows])
                for rows, batch, outcome in ran
            ]
            bounds = self._bounds(options, weights, steps)
            if bounds is not None:
                return [truth_from(options, s.outcome, rows_of(bounds, s.rows)) for s in steps]
        return truths_of(options, weights, served)[0]

    def _bounds(
        self, options: Options, weights: dict[str, torch.Tensor], steps: Sequence[Ran]
    ) -> reference.Bounds | None:
        """A run of all texts that chose as these steps did; None if the reference must not.

        The same rows come near the same ties again and again, so what was followed once serves
        other batches.
        """
        chosen = [(s.rows, choices_of(s.options, s.batch, s.outcome)) for s in steps]
        for bounds in (self.bounds, *reversed(self.followed)):
            if all(chose_as(bounds, *of_step) for of_step in chosen):
                return bounds
        taps = self.bounds.result.taps
        bounds = followed(options, weights, _whole(self.texts), steps, self.ranks, own=taps)
        if not all(chose_as(bounds, *of_step) for of_step in chosen):
            return None
        self.followed.append(bounds)
        del self.followed[:-MOST_FOLLOWED]
        return bounds

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The first row of each text."""
        return [0, *accumulate(map(len, self.texts))]

    def _rows(self, batch: Batch) -> torch.Tensor | None:
        """The rows of the whole texts that a batch is made of, int64 [T]; None if it is not."""
        tokens, start = batch.token_ids.tolist(), 0
        rows: list[int] = []
        for length in batch.seq_lens:
            number = self._text_of(tokens[start : start + length])
            if number is None:
                return None
            rows += range(self._starts[number], self._starts[number] + length)
            start += length
        return torch.tensor(rows, dtype=torch.int64)

    def _text_of(self, tokens: Sequence[int]) -> int | None:
        for number, whole in enumerate(self.texts):
            if list(whole[: len(tokens)]) == list(tokens):
                return number
        return None


def _whole(texts: Sequence[Sequence[int]]) -> Batch:
    return Batch.of([token for one in texts for token in one], [*map(len, texts)])

"""What every step of some requests has to be: rows of the reference's run of the whole sequences.

Attention and the choice of blocks are causal, and nothing else mixes tokens. So what a decode step
or a chunk has to be does not depend on how the sequence came: it is the same rows of the run of
the whole sequence, which the reference makes once, after the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

import reference
from model.batch import Batch
from rankfold.options import Options
from rankfold.run import Outcome
from rankfold.serving.drive import Served
from rankfold.truth import (
    Choices,
    Truth,
    reference_of,
    routing_of,
    rows_of,
    selection_of,
    truth_from,
)

ChosenOf = Callable[[Options, Batch, Outcome], dict[int, torch.Tensor]]


def truths_of(
    options: Options, weights: Mapping[str, torch.Tensor], served: Served
) -> tuple[list[Truth], reference.Bounds]:
    """The truth of each step that ran, and the reference's run behind them.

    The run's choices of experts and blocks are followed where they are legal.
    """
    whole, rows = whole_of(served), rows_by_step(served)
    steps = [
        Ran(options=options, batch=batch, outcome=outcome, rows=of_step)
        for batch, outcome, of_step in zip(served.batches, served.outcomes, rows, strict=True)
    ]
    bounds = followed(options, weights, whole, steps, options.topology.tp)
    truths = [
        truth_from(options, outcome, rows_of(bounds, of_step))
        for outcome, of_step in zip(served.outcomes, rows, strict=True)
    ]
    return truths, bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """A step that ran on some ranks that have its tokens."""

    options: Options
    batch: Batch
    outcome: Outcome
    rows: torch.Tensor
    """int64 [T]: the rows of the whole sequences that it is made of; -1 for one of another."""


def followed(
    options: Options,
    weights: Mapping[str, torch.Tensor],
    whole: Batch,
    steps: Sequence[Ran],
    ranks: int,
    own: Mapping[str, torch.Tensor] | None = None,
) -> reference.Bounds:
    """The reference's run of whole sequences, which follows what their steps chose.

    Where several steps ran the same row the last one counts; a row that no step ran, as after one
    that broke, is the reference's own choice.

    ranks: how many ranks' addends a sum adds. own: the taps of the reference's own run of the whole
    sequences, if there was one.
    """
    routing = _gathered(steps, routing_of, whole.tokens)
    selection = _gathered(steps, selection_of, whole.tokens)
    if any((chosen == MISSING).any() for chosen in (*routing.values(), *selection.values())):
        if own is None:
            own = reference_of(options, weights, whole, ranks).result.taps
        _fill(routing, own, "experts_chosen")
        _fill(selection, own, "blocks_chosen")
    return reference_of(
        options, weights, whole, ranks, Choices(routing=routing, selection=selection)
    )


def whole_of(served: Served) -> Batch:
    """The sequences as far as they were fed, each whole."""
    lengths = served.lengths
    fed = [t for of_one, n in zip(served.tokens, lengths, strict=True) for t in of_one[:n]]
    return Batch.of(fed, lengths)


def rows_by_step(served: Served) -> list[torch.Tensor]:
    """For each step that ran, the rows of the whole sequences that it is made of, int64 [T]."""
    starts = [0, *accumulate(served.lengths)]
    return [
        torch.tensor([starts[request] + at for request, at in step.rows()], dtype=torch.int64)
        for step in served.steps
    ]


MISSING = -2
"""Marks a choice that is not known; -1 is "no block"."""


def _gathered(steps: Sequence[Ran], chosen_of: ChosenOf, tokens: int) -> dict[int, torch.Tensor]:
    """What all steps chose, by layer, in the rows of the whole sequences."""
    gathered: dict[int, torch.Tensor] = {}
    for step in steps:
        for layer, chosen in chosen_of(step.options, step.batch, step.outcome).items():
            if layer not in gathered:
                gathered[layer] = torch.full((tokens, *chosen.shape[1:]), MISSING)
            known = step.rows >= 0
            gathered[layer][step.rows[known]] = chosen[known]
    return gathered


def _fill(gathered: Mapping[int, torch.Tensor], own: Mapping[str, torch.Tensor], what: str) -> None:
    for layer, chosen in gathered.items():
        missing = (chosen == MISSING).flatten(1).any(dim=1)
        chosen[missing] = own[f"layers.{layer}.{what}"][missing].long()

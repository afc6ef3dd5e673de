"""What every step of some requests has to be: rows of the reference's run of the whole sequences.

Attention and the choice of blocks are causal, and nothing else mixes tokens. So what a decode step
or a chunk has to be does not depend on how the sequence came: it is the same rows of the run of
the whole sequence, which the reference makes once, after the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    ranks = options.topology.tp
    routing = _gathered(options, served, routing_of, rows, whole.tokens)
    selection = _gathered(options, served, selection_of, rows, whole.tokens)
    if any((chosen == MISSING).any() for chosen in (*routing.values(), *selection.values())):
        # A step broke: what it did not choose any more, the reference chooses for it.
        own = reference_of(options, weights, whole, ranks).result.taps
        _fill(routing, own, "experts_chosen")
        _fill(selection, own, "blocks_chosen")
    bounds = reference_of(
        options, weights, whole, ranks, Choices(routing=routing, selection=selection)
    )
    truths = [
        truth_from(options, outcome, rows_of(bounds, of_step))
        for outcome, of_step in zip(served.outcomes, rows, strict=True)
    ]
    return truths, bounds


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


def _gathered(
    options: Options,
    served: Served,
    chosen_of: ChosenOf,
    rows: Sequence[torch.Tensor],
    tokens: int,
) -> dict[int, torch.Tensor]:
    """What all steps chose, by layer, in the rows of the whole sequences."""
    gathered: dict[int, torch.Tensor] = {}
    for batch, outcome, of_step in zip(served.batches, served.outcomes, rows, strict=True):
        for layer, chosen in chosen_of(options, batch, outcome).items():
            if layer not in gathered:
                gathered[layer] = torch.full((tokens, *chosen.shape[1:]), MISSING)
            gathered[layer][of_step] = chosen
    return gathered


def _fill(gathered: Mapping[int, torch.Tensor], own: Mapping[str, torch.Tensor], what: str) -> None:
    for layer, chosen in gathered.items():
        missing = (chosen == MISSING).flatten(1).any(dim=1)
        chosen[missing] = own[f"layers.{layer}.{what}"][missing].long()

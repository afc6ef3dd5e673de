"""An example of DP ranks with tokens of their own: one step, judged once for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from model.batch import Batch
from rankfold.data_parallel import (
    Batches,
    judged_together,
    of_rank,
    others_change,
    tokens_change,
    view,
)
from rankfold.example import Example
from rankfold.judge import Judgement, Related
from rankfold.options import Options
from rankfold.rig import Rig
from rankfold.run import Outcome
from rankfold.truth import Truth

TruthOf = Callable[[Options, Batch, Outcome], Truth]
"""What an outcome has to be, of one DP rank's options and batch."""


def judge_on_dp_ranks(rig: Rig, example: Example, options: Options, truth_of: TruthOf) -> Judgement:
    """Run the example and apply every check to each DP rank; known findings are set aside.

    Raises:
        SimError: the ranks broke while the model was built.
    """
    batches, schedule = example.batches(), example.run_schedule()
    outcome = rig.step(options, batches, schedule=schedule)
    truths = [
        truth_of(of_rank(options, batch), batch, view(outcome, dp_rank))
        for dp_rank, batch in enumerate(batches)
    ]
    related: list[list[Related]] = [[] for _ in batches]
    if example.relation and outcome.broke is None:
        related = _related(rig, example, options, batches, truths)
    return judged_together(options, batches, outcome, truths, related, set_known_aside=True)


def _related(
    rig: Rig, example: Example, options: Options, batches: Batches, truths: Sequence[Truth]
) -> list[list[Related]]:
    """The tokens of the DP rank with most of them change; the others must not notice."""
    most = max(range(len(batches)), key=lambda dp_rank: batches[dp_rank].tokens)
    relations = [
        tokens_change(options, batch) if dp_rank == most else others_change(batch)
        for dp_rank, batch in enumerate(batches)
    ]
    derived = tuple(relation.derived[0] for relation in relations)
    outcome = rig.step(options, derived, schedule=example.run_schedule())
    return [
        [Related(relation=relation, outcomes=[view(outcome, dp_rank)], bounds=[truth.bounds])]
        for dp_rank, (relation, truth) in enumerate(zip(relations, truths, strict=True))
    ]

"""The same steps with other tokens in one request: what the other requests must not notice.

Every request has pages of its own in the caches, so a change in one of them changes no bit of the
others, in no step; and none of the rows before it in its own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.batch import Batch
from properties.relations import Relation
from rankfold.judge import Related
from rankfold.run import Outcome
from rankfold.serving.drive import RunStep, Served, serve


def changed(
    tokens: Sequence[Sequence[int]], request: int, start: int, vocab: int
) -> list[list[int]]:
    """The tokens of all requests, those of one from a position on being other ones."""
    made = [list(of_request) for of_request in tokens]
    made[request][start:] = [(token + 1) % vocab for token in made[request][start:]]
    return made


def related_steps(run: RunStep, served: Served, vocab: int) -> list[list[Related]]:
    """Run the steps again with other tokens in the second half of the middle request.

    Args:
        run: runs a step.
        served: the steps that ran, all to their end.
        vocab: token ids.

    Returns:
        For each step the relation, as `rankfold.judge.judge` takes it.
    """
    lengths = served.plan.lengths
    request = len(lengths) // 2
    start = lengths[request] // 2
    fed = [of_one[:n] for of_one, n in zip(served.tokens, lengths, strict=True)]
    again = serve(run, served.plan, changed(fed, request, start, vocab))
    change = f"the tokens of request {request} from position {start} on change"
    related: list[list[Related]] = []
    for number, step in enumerate(served.steps):
        if number >= len(again.outcomes):
            related.append([])
            continue
        kept = [of != request or position < start for of, position in step.rows()]
        before, after = served.batches[number], again.batches[number]
        related.append([rows_kept(change, kept, before, after, again.outcomes[number])])
    return related


def rows_kept(
    change: str, kept: Sequence[bool], before: Batch, after: Batch, outcome: Outcome
) -> Related:
    """That some rows of a step stay as they are, in the same step of other tokens.

    Without bounds: where bits may move by rounding, as after MegaMoE's grouped experts, a near tie
    that falls the other way would have to be followed through the later steps.

    Args:
        change: what is different, to go after "when".
        kept: for each row whether it stays.
        before, after: the batches.
        outcome: of the second one.
    """
    relation = Relation(
        change=change,
        base=before,
        derived=(after,),
        rows=(tuple((row, row) for row, stays in enumerate(kept) if stays),),
        in_place=True,
    )
    return Related(relation=relation, outcomes=[outcome], bounds=None)

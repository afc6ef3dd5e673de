"""What every step of every lane has to be: rows of the reference's runs of all requests.

There is one run for each side, over the courses that ran there. The decoding side's follows what
the prefilling side chose for the tokens whose keys and values were handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

import reference
from model.batch import Batch
from rankfold.deployment.drive import Served, Side
from rankfold.deployment.lane import Course, Lane
from rankfold.options import Options
from rankfold.serving.drive import Served as Steps
from rankfold.serving.plan import Part, Plan, Step
from rankfold.serving.truth import Ran, followed
from rankfold.truth import Truth, rows_of, summed_ranks, truth_from

RowOf = Callable[[int, int], int]
"""The row of the reference's run that a course's token is, by the course's number; -1 for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LaneRun:
    """What a lane ran, and what it has to be."""

    lane: Lane
    options: Options
    steps: Steps
    truths: list[Truth]


@dataclass(frozen=True, kw_only=True, eq=False)
class Truths:
    """The lanes of both sides, and the reference's run of all requests."""

    lanes: dict[str, list[LaneRun]]
    """By side, in their order."""
    bounds: reference.Bounds | None
    """Of the decoding side, in the order of the requests; None if some were not served."""


def truths_of(weights: Mapping[str, torch.Tensor], served: Served) -> Truths:
    """What the steps of a deployment have to be."""
    lanes: dict[str, list[LaneRun]] = {}
    bounds, ranks = None, 1
    for side in served.sides:
        options = side.workers[0].options
        ranks = max(ranks, summed_ranks(options, options.topology))
        fed = [course.tokens[: course.fed] if course.ready else [] for course in side.courses]
        starts = [0, *accumulate(map(len, fed))]
        # What was handed over first: a row that both sides ran is the decoding side's own.
        ran = _handed_on(served, starts) if side is not served.prefill else []
        row_of = _row_of(starts)
        own = [(lane, _ran(options, lane, row_of)) for _, lane in side.lanes]
        ran += [step for _, steps in own for step in steps]
        whole = Batch.of([token for of_one in fed for token in of_one], [*map(len, fed)])
        bounds = followed(options, weights, whole, ran, ranks)
        lanes[side.name] = [
            LaneRun(
                lane=lane,
                options=options,
                steps=_steps(side, lane),
                truths=[truth_from(options, s.outcome, rows_of(bounds, s.rows)) for s in steps],
            )
            for lane, steps in own
        ]
        if side is served.decode and served.whole:
            decoded = [served.final[i][1].number for i in range(len(served.load.requests))]
            rows = [row for number in decoded for row in range(starts[number], starts[number + 1])]
            return Truths(lanes=lanes, bounds=rows_of(bounds, torch.tensor(rows)))
    return Truths(lanes=lanes, bounds=None)


def requests_of(served: Served) -> Steps:
    """All requests that were served, as if one step had run them."""
    final = [served.final[i] for i in sorted(served.final)]
    lengths = [decode.goal for _, decode in final]
    parts = [Part(request=i, start=0, length=n) for i, n in enumerate(lengths)]
    return Steps(
        plan=Plan(
            lengths=tuple(lengths),
            prompts=tuple(prefill.prompt for prefill, _ in final),
            steps=(Step(parts=tuple(parts)),),
        ),
        tokens=[decode.tokens for _, decode in final],
        sampled=[decode.sampled for _, decode in final],
        prompt_logprobs=[prefill.prompt_logprobs for prefill, _ in final],
        logprobs=[decode.logprobs for _, decode in final],
        outcomes=[served.decode.workers[0].outcomes[-1]] if final else [],
    )


def _ran(options: Options, lane: Lane, row_of: RowOf) -> list[Ran]:
    """The steps of a lane that ran."""
    return [
        Ran(
            options=options,
            batch=batch,
            outcome=outcome,
            rows=torch.tensor([row_of(n, at) for n, at in step.rows()], dtype=torch.int64),
        )
        for step, batch, outcome in zip(lane.steps, lane.batches, lane.outcomes, strict=False)
    ]


def _row_of(starts: Sequence[int]) -> RowOf:
    return lambda number, at: starts[number] + at


def _handed_on(served: Served, starts: Sequence[int]) -> list[Ran]:
    """The steps of the prefilling side, in the rows of the courses that went on with them."""
    if served.prefill is None:
        return []
    goes_on = {hand.sender.number: hand.receiver for hand, _ in served.handing.contents}

    def row_of(number: int, at: int) -> int:
        receiver = goes_on.get(number)
        # The last prompt token is run again.
        known = receiver is not None and at < receiver.prompt - 1
        return starts[receiver.number] + at if receiver is not None and known else -1

    options = served.prefill.workers[0].options
    return [step for _, lane in served.prefill.lanes for step in _ran(options, lane, row_of)]


def _steps(side: Side, lane: Lane) -> Steps:
    """A lane's steps, as the checks of steps take them."""

    def each(of: Callable[[Course], list[float]]) -> list[list[float]]:
        return [of(course) for course in side.courses]

    return Steps(
        plan=Plan(
            lengths=tuple(course.goal for course in side.courses),
            prompts=tuple(course.prompt for course in side.courses),
            steps=tuple(lane.steps),
            names=tuple(map(str, side.courses)),
        ),
        tokens=[course.tokens for course in side.courses],
        sampled=[course.sampled for course in side.courses],
        prompt_logprobs=each(lambda course: course.prompt_logprobs),
        logprobs=each(lambda course: course.logprobs),
        batches=lane.batches,
        outcomes=lane.outcomes,
    )

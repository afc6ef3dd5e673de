"""The same load with other tokens in one request: what the other requests must not notice.

Requests share steps, DP ranks and the wire, but no value: a change in one of them changes no bit of
the others, on no lane and in no step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankfold.deployment.drive import Drive, Load, Served
from rankfold.deployment.lane import Lane
from rankfold.judge import Related as RelatedStep
from rankfold.options import Options
from rankfold.rig import Rig
from rankfold.run import Progress
from rankfold.serving.relate import changed, rows_kept

Related = Mapping[str, Sequence[Sequence[Sequence[RelatedStep]]]]
"""By side, lane and step."""


def related_to(rig: Rig, options: Options, served: Served, progress: Progress) -> Related:
    """Serve again, with other tokens in the second half of the middle request.

    served: all requests, each to its end.
    """
    load, vocab = served.load, options.tiny.vocab_size
    request = len(load.requests) // 2
    start = load.requests[request].length // 2
    fed = [served.final[i][1].tokens for i in range(len(load.requests))]
    prompts = [len(each.prompt) for each in load.requests]
    tokens = changed(fed, request, start, vocab)
    again = Drive(rig, options, served.deployment, _fed(load, tokens, prompts), progress).run()
    change = f"the tokens of request {request} from position {start} on change"
    return {
        mine.name: [
            _steps(lane, other, {c.number: c.request for c in mine.courses}, request, start, change)
            for (_, lane), (_, other) in zip(mine.lanes, theirs.lanes, strict=True)
        ]
        for mine, theirs in zip(served.sides, again.sides, strict=True)
    }


def _fed(load: Load, tokens: Sequence[Sequence[int]], prompts: Sequence[int]) -> Load:
    """The load with these tokens."""
    requests = [
        replace(request, prompt=tuple(of_one[:prompt]))
        for request, of_one, prompt in zip(load.requests, tokens, prompts, strict=True)
    ]
    return replace(load, requests=requests, fed=tokens)


def _steps(
    lane: Lane,
    again: Lane,
    request_of: Mapping[int, int],
    request: int,
    start: int,
    change: str,
) -> list[list[RelatedStep]]:
    """The relation of each step of a lane."""
    related: list[list[RelatedStep]] = []
    for number, step in enumerate(lane.steps[: len(lane.outcomes)]):
        # Lengths and the seed alone decide what runs when, so the steps are the same.
        if number >= len(again.outcomes) or again.steps[number] != step:
            related.append([])
            continue
        kept = [request_of[of] != request or position < start for of, position in step.rows()]
        before, after = lane.batches[number], again.batches[number]
        related.append([rows_kept(change, kept, before, after, again.outcomes[number])])
    return related

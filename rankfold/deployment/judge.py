"""All checks of all lanes, put together: those of the first lane that fails, or what holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from properties import TapVerdict, Verdict
from properties.handover import handed_over
from properties.headline import headline
from rankfold.deployment.drive import Served
from rankfold.deployment.relate import Related
from rankfold.deployment.truth import LaneRun, Truths
from rankfold.judge import Related as RelatedSteps
from rankfold.serving.judge import ServedJudgement, checks_that_hold, judge_steps


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the checks say of a deployment."""

    checks: list[Verdict]
    """The one to read first stands first, if one fails."""
    taps: list[TapVerdict]
    """Of the first step that fails; or of each tap the value nearest to its bound."""
    steps: int
    """That were judged."""

    @property
    def headline(self) -> Verdict | None:
        """The check to read first; None if all hold."""
        return next((check for check in self.checks if not check.ok), None)


def judge_deployment(served: Served, truths: Truths, related: Related | None = None) -> Judged:
    """Apply every check to every step of every lane, and to the hand-overs.

    related: the same load with other tokens in one request; None to leave that check out.

    Checks go along the way of a request: prefill, hand-over, decode. The first that fails is the
    cause of what fails after it.
    """
    of_sides = {
        side: [
            (run, judge_steps(run.options, run.steps, run.truths, related=_of(related, side, at)))
            for at, run in enumerate(runs)
            if run.truths
        ]
        for side, runs in truths.lanes.items()
    }
    steps = sum(len(run.truths) for runs in truths.lanes.values() for run in runs)
    handed = [_handed(served)] if served.prefill is not None else []
    between = [*handed, _requests(served)]
    for side, judged in of_sides.items():
        if side == served.decode.name and not all(check.ok for check in handed):
            before = [pair for other, of in of_sides.items() if other != side for pair in of]
            return Judged(checks=[*between, *_together(before)[1]], taps=[], steps=steps)
        if failed := _first_failed(judged):
            run, judgement = failed
            return Judged(
                checks=[*_of_lane(run, judgement), *between], taps=judgement.taps, steps=steps
            )
    taps, held = _together([pair for judged in of_sides.values() for pair in judged])
    checks = sorted([*held, *between], key=lambda check: check.ok)
    return Judged(checks=checks, taps=taps, steps=steps)


def _of(related: Related | None, side: str, lane: int) -> Sequence[Sequence[RelatedSteps]]:
    return () if related is None else related[side][lane]


def _first_failed(
    judged: Sequence[tuple[LaneRun, ServedJudgement]],
) -> tuple[LaneRun, ServedJudgement] | None:
    """The lane that fails in the earliest of its steps."""
    failed = [(run, each) for run, each in judged if each.violated is not None]
    return min(failed, key=lambda pair: pair[1].violated or 0, default=None)


def _of_lane(run: LaneRun, judgement: ServedJudgement) -> list[Verdict]:
    """A lane's checks, the one to read first in front."""
    first = headline(judgement.checks, judgement.taps)
    ordered = sorted(judgement.checks, key=lambda check: (check is not first, check.ok))
    return [
        check
        if check.ok
        else replace(
            check, what=f"{run.lane.name}: {check.what}", where=f"{run.lane.name}, {check.where}"
        )
        for check in ordered
    ]


def _together(
    judged: Sequence[tuple[LaneRun, ServedJudgement]],
) -> tuple[list[TapVerdict], list[Verdict]]:
    """The taps and checks of lanes that hold."""
    worst: dict[str, TapVerdict] = {}
    for _, judgement in judged:
        for tap in judgement.taps:
            if tap.name not in worst or _share(tap) > _share(worst[tap.name]):
                worst[tap.name] = tap
    checks = checks_that_hold(
        [of_step for _, judgement in judged for of_step in judgement.each],
        [truth for run, _ in judged for truth in run.truths],
        f" of {len(judged)} DP ranks",
    )
    return [*worst.values()], checks


def _share(tap: TapVerdict) -> float:
    return tap.max_abs_err / tap.bound if tap.bound else tap.max_abs_err


def _handed(served: Served) -> Verdict:
    """Every hand-over that came to its end brought what was prefilled."""
    return handed_over({str(hand.sender): content for hand, content in served.handing.contents})


def _requests(served: Served) -> Verdict:
    """Every request was served once, and with as many tokens as were asked for."""
    name, count = "requests", len(served.load.requests)
    if served.stopped:
        return Verdict(
            name=name,
            ok=False,
            what=served.stopped,
            where=str(served.deployment),
            why="see the other checks" if served.in_step else "a hand-over lost it",
            kind="missing",
            at="requests",
        )
    decoded = [course.request for course in served.decode.courses if course.ready]
    for index, request in enumerate(served.load.requests):
        times = decoded.count(index)
        tokens = len(served.final[index][1].sampled)
        if times != 1 or tokens != request.decode + 1:
            return Verdict(
                name=name,
                ok=False,
                what=f"request {index} was decoded {times} times, with {tokens} tokens",
                where=str(served.deployment),
                why=f"it has to be decoded once, with {request.decode + 1} tokens",
                kind="duplicated" if times > 1 else "missing",
                at="requests",
            )
    tokens = sum(len(decode.sampled) for _, decode in served.final.values())
    return Verdict(
        name=name, ok=True, what=f"{count} requests were served once each, {tokens} tokens in all"
    )

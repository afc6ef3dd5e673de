"""All checks of all steps, as those of the first step that fails, or as the worst of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from properties import TapVerdict, Verdict
from rankfold import verdicts
from rankfold.judge import Judgement, Related, judge
from rankfold.known import Known
from rankfold.options import Options
from rankfold.serving.drive import Served
from rankfold.truth import Truth

SHOWN = 8
"""Most positions that a verdict names."""


@dataclass(frozen=True, kw_only=True)
class ServedJudgement(Judgement):
    """What the checks say of some requests."""

    violated: int | None
    """The first step that fails; what fails after it may follow from it."""
    each: tuple[Judgement, ...]
    """Of the steps that ran."""

    @property
    def steps(self) -> tuple[bool, ...]:
        """Whether each step that ran holds."""
        return tuple(of_step.ok for of_step in self.each)


def judge_steps(
    options: Options,
    served: Served,
    truths: Sequence[Truth],
    *,
    related: Sequence[Sequence[Related]] = (),
    set_known_aside: bool = False,
) -> ServedJudgement:
    """Apply every check to every step.

    Args:
        options: the model and its topology.
        served: the steps.
        truths: of each step.
        related: for each step the relations whose steps ran as well; () for none.
        set_known_aside: as in `rankfold.judge.judge`.
    """
    judged = []
    for number, (outcome, truth) in enumerate(zip(served.outcomes, truths, strict=True)):
        of_step = replace(options, tokens=served.steps[number].tokens, sequences=1)
        judged.append(
            judge(
                of_step,
                outcome,
                truth,
                related=related[number] if related else (),
                set_known_aside=set_known_aside,
            )
        )
    known: dict[str, Known] = {}
    for each in judged:
        known |= each.known
    violated = next((i for i, each in enumerate(judged) if not each.ok), None)
    if violated is None:
        checks, taps = checks_that_hold(judged, truths), _worst(judged)
    else:
        checks = [_placed(check, served, violated) for check in judged[violated].checks]
        taps = judged[violated].taps
    return ServedJudgement(
        checks=checks,
        taps=taps,
        known=known,
        violated=violated,
        each=tuple(judged),
    )


def checks_that_hold(
    judged: Sequence[Judgement], truths: Sequence[Truth], of: str = ""
) -> list[Verdict]:
    """One verdict for each check, where all hold.

    Args:
        judged: of each step.
        truths: likewise.
        of: what the steps are of, as " of 4 DP ranks".
    """
    by_name: dict[str, list[Verdict]] = {}
    for each in judged:
        for check in each.checks:
            by_name.setdefault(check.name, []).append(check)
    merged = []
    for name, of_steps in by_name.items():
        what = verdicts.selected(*truths) if name == "selection" else of_steps[0].what
        more = len(of_steps) - 1
        steps = "step" if more == 1 else "steps"
        likewise = f"; likewise in {more} more {steps}{of}" if more and name != "selection" else ""
        merged.append(replace(of_steps[0], what=what + likewise))
    return merged


def _worst(judged: Sequence[Judgement]) -> list[TapVerdict]:
    """Each tap in the step where it is furthest off."""
    worst: dict[str, TapVerdict] = {}
    for each in judged:
        for tap in each.taps:
            if tap.name not in worst or tap.max_abs_err > worst[tap.name].max_abs_err:
                worst[tap.name] = tap
    return [worst[name] for name in dict.fromkeys(tap.name for e in judged for tap in e.taps)]


def _placed(check: Verdict, served: Served, number: int) -> Verdict:
    """A failed check with the step and the requests that it is about."""
    if check.ok:
        return check
    where = served.plan.describe(number)
    rows = served.steps[number].rows()
    of_requests: dict[int, list[int]] = {}
    for row in check.rows:
        if row < len(rows):
            request, position = rows[row]
            of_requests.setdefault(request, []).append(position)
    for request, positions in of_requests.items():
        shown = ", ".join(map(str, positions[:SHOWN])) + (", ..." if len(positions) > SHOWN else "")
        plural = "s" if len(positions) > 1 else ""
        where += f"; {served.plan.name(request)}, position{plural} {shown}"
    return replace(check, where=f"{where}; {check.where}" if check.where else where)

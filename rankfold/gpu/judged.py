"""The verdicts on full-scale results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rankfold.gpu.readers import Accuracy, Found, Logprobs, Throughput
from rankfold.gpu.rows import Row, not_run, passed
from rankfold.gpu.thresholds import Thresholds

RUNS = 2
"""Runs of an arm below which there is no spread to show."""
_QUESTIONS = 1319
"""Of GSM8K's test set."""


def full_scale(found: Sequence[Found], thresholds: Thresholds, why_none: str) -> list[Row]:
    """A row for each result, or each comparison of results; N/A where there is none.

    Args:
        found: what was read, in the order given.
        thresholds: what it has to reach.
        why_none: why nothing was read of a kind.
    """
    return [
        *_accuracy([f for f in found if isinstance(f, Accuracy)], thresholds, why_none),
        *_logprobs([f for f in found if isinstance(f, Logprobs)], thresholds, why_none),
        *_throughput([f for f in found if isinstance(f, Throughput)], thresholds, why_none),
    ]


def _accuracy(found: Sequence[Accuracy], thresholds: Thresholds, why: str) -> Iterable[Row]:
    if not found:
        yield not_run("GSM8K", why)
    for each in found:
        asked = (
            "questions of unknown number"
            if each.questions is None
            else (f"{each.questions} questions")
        )
        part = each.questions is not None and each.questions < _QUESTIONS
        yield passed(
            f"GSM8K, {each.arm}",
            each.accuracy >= thresholds.gsm8k,
            f"{each.accuracy:.4f} on {asked}{f' of {_QUESTIONS}' if part else ''}, at least "
            f"{thresholds.gsm8k:g} is asked for",
        )


def _logprobs(found: Sequence[Logprobs], thresholds: Thresholds, why: str) -> Iterable[Row]:
    name = "prompt logprobs, PP against PP"
    if not found:
        yield not_run(name, why)
    if len(found) == 1:
        yield not_run(name, f"only {found[0].arm} was read; two are compared")
    for other in found[1:]:
        yield _same_logprobs(found[0], other, thresholds)


def _same_logprobs(one: Logprobs, other: Logprobs, thresholds: Thresholds) -> Row:
    name = f"prompt logprobs, {other.arm} against {one.arm}"
    tokens = [[[token for token, _ in prompt] for prompt in each.prompts] for each in (one, other)]
    if tokens[0] != tokens[1]:
        return passed(
            name,
            False,
            f"not of the same prompts: {len(one.prompts)} with {one.positions} positions, and "
            f"{len(other.prompts)} with {other.positions}",
        )
    if not one.positions:
        return not_run(name, "the prompts have no scored position")
    deltas = {
        (number, position): abs(a - b)
        for number, (ours, theirs) in enumerate(zip(one.prompts, other.prompts, strict=True))
        for position, ((_, a), (_, b)) in enumerate(zip(ours, theirs, strict=True), 1)
    }
    (number, position), delta = max(deltas.items(), key=lambda item: item[1])
    differ = sum(map(bool, deltas.values()))
    seen = f"{len(one.prompts)} prompts, {one.positions} positions: "
    if not differ:
        return passed(name, True, seen + "all equal")
    return passed(
        name,
        delta <= thresholds.logprob_delta,
        f"{seen}{differ} differ, most of all position {position} of prompt {number}, by "
        f"{delta:.3g}; at most {thresholds.logprob_delta:g} is allowed",
    )


def _throughput(found: Sequence[Throughput], thresholds: Thresholds, why: str) -> Iterable[Row]:
    if not found:
        yield not_run("throughput, arm against arm", why)
    for workload in dict.fromkeys(each.workload for each in found):
        runs = [each for each in found if each.workload == workload]
        yield from _workload(workload, runs, thresholds)


def _workload(workload: str, runs: Sequence[Throughput], thresholds: Thresholds) -> Iterable[Row]:
    arms = {arm: [r for r in runs if r.arm == arm] for arm in dict.fromkeys(r.arm for r in runs)}
    name = f"throughput, {' against '.join(arms)}"
    shown = "; ".join(
        f"{arm} {', '.join(f'{run.tokens_per_second:g}' for run in of_arm)}"
        for arm, of_arm in arms.items()
    )
    said = f"{workload}: {shown} tokens/s"
    if len(arms) < 2:
        yield not_run(name, f"{said}; there is no other arm of this workload")
        return
    few = [arm for arm, of_arm in arms.items() if len(of_arm) < RUNS]
    if few:
        yield not_run(name, f"{said}; {', '.join(few)} has one run, which shows no spread")
        return
    means = {arm: sum(r.tokens_per_second for r in of) / len(of) for arm, of in arms.items()}
    best = max(means, key=lambda arm: means[arm])
    worst = min(means, key=lambda arm: means[arm])
    lacks = 1 - means[worst] / means[best]
    spread = max(_spread(of_arm) for of_arm in arms.values())
    said += f"; means {lacks:.1%} apart, runs of an arm up to {spread:.1%} apart"
    if not _in_turns(runs):
        said += "; the runs were not in turns"
    yield passed(
        name,
        lacks <= thresholds.throughput_loss,
        f"{said}; at most {thresholds.throughput_loss:.0%} is allowed",
    )


def _spread(runs: Sequence[Throughput]) -> float:
    values = [run.tokens_per_second for run in runs]
    return 1 - min(values) / max(values)


def _in_turns(runs: Sequence[Throughput]) -> bool:
    """Whether the arms took turns, as far as the files say when they ran."""
    if not all(run.date for run in runs):
        return True
    arms = [run.arm for run in sorted(runs, key=lambda run: run.date)]
    return sum(a != b for a, b in pairwise(arms)) >= len(set(arms))

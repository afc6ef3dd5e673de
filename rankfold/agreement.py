"""Whether the folded transport and real gloo agree on an example: outputs, ledger and verdict.

| compared | how |
|---|---|
| taps | at TP of 1 or 2, where a sum has one order, equal; else within rounding (*) |
| ledger | equal, in canonical order |
| verdict | the headline's check, kind and place; of a run that broke, the kind of error |

(*) within the bounds of both runs, where both hold and chose the same experts.

Not compared: the sanitizer's findings, since it needs the operands of all ranks in one process, and
errors of late delivery, which only the folded transport can look for. After a mismatch gloo may go
on with what it has, so the taps of a run that broke are not compared either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from model.taps import Captured
from properties.headline import broken
from rankfold.examiner import References
from rankfold.example import Example
from rankfold.judge import Judgement, judge
from rankfold.rig import Rig
from rankfold.run import Outcome
from rankfold.truth import Truth
from sim import SimError
from sim.ledger import Entry, first_difference

COMMUTES = 2
"""Addends whose sum does not depend on their order."""

_NOT_LOADED = "is not loaded"
"""The kind of a verdict on a parameter that nobody has written."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One transport's run of an example."""

    outcome: Outcome | None
    """None if the model could not be built."""
    truth: Truth | None
    headline: tuple[str, str, str] | None
    """Check, kind and place of the first violation; None if all hold."""


def see(rig: Rig, example: Example, references: References) -> Seen:
    """Run an example and judge it, without the sanitizer."""
    options, batch = example.options(), example.batch()
    try:
        outcome = rig.step(options, batch, schedule=replace(example.run_schedule(), late=False))
    except SimError as error:
        return Seen(outcome=None, truth=None, headline=_headline(_broken(error), True))
    outcome = replace(outcome, findings=None)
    truth = references.truth(rig, options, batch, outcome)
    judged = judge(options, outcome, truth, set_known_aside=True)
    return Seen(outcome=outcome, truth=truth, headline=_headline(judged, outcome.broke is not None))


def disagreement(folded: Seen, gloo: Seen) -> str | None:
    """What two runs of an example differ in, in one line; None if they agree."""
    if folded.headline != gloo.headline:
        return f"verdicts: folded {folded.headline}, gloo {gloo.headline}"
    if folded.outcome is None or gloo.outcome is None:
        return None
    if folded.outcome.broke is not None or gloo.outcome.broke is not None:
        kinds = [s.outcome.broke and s.outcome.broke.kind for s in (folded, gloo) if s.outcome]
        return None if kinds[0] == kinds[1] else f"errors: folded {kinds[0]}, gloo {kinds[1]}"
    entries = folded.outcome.ledger.entries, gloo.outcome.ledger.entries
    if _may_route_otherwise(folded.outcome, gloo.outcome):
        entries = [*map(_unsized, entries[0])], [*map(_unsized, entries[1])]
    if wrong := first_difference(*entries):
        return f"ledgers: {wrong}"
    if folded.headline is not None and folded.headline[1] == _NOT_LOADED:
        return None  # the values are what the memory happened to hold
    return _taps(folded, gloo, folded.outcome, gloo.outcome)


def _may_route_otherwise(ours: Outcome, theirs: Outcome) -> bool:
    """Whether a near tie between experts fell the other way, where sums have another order."""
    apart = ours.topology.tp > COMMUTES
    return apart and not _same_experts(ours.captured, theirs.captured)


def _unsized(entry: Entry) -> Entry:
    """An exchange between experts without how much was exchanged: that is up to the routing."""
    if not entry.op.startswith("all_to_all"):
        return entry
    return entry._replace(bytes=0, shapes=())


def _taps(folded: Seen, gloo: Seen, ours: Outcome, theirs: Outcome) -> str | None:
    same_order = ours.topology.tp <= COMMUTES
    for rank, (mine, other) in enumerate(zip(ours.captured, theirs.captured, strict=True)):
        if list(mine) != list(other):
            return f"taps of rank {rank}: folded {list(mine)}, gloo {list(other)}"
        for name in mine:
            a, b = mine[name].value, other[name].value
            if same_order:
                good = _same_bits(a, b)
            elif folded.headline is None and _same_experts(ours.captured, theirs.captured):
                good = _within(a, b, _bound(folded, name) + _bound(gloo, name))
            else:
                good = a.shape == b.shape
            if not good:
                return f"tap {name} of rank {rank}: {_delta(a, b)}"
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # Two NaN are equal: which bits a sum of NaN has is up to the order of its addends.
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _within(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    if a.shape != b.shape:
        return False
    delta = (a.double() - b.double()).abs()
    return not delta.numel() or bool(delta.nan_to_num(nan=0.0).max() <= bound)


def _bound(seen: Seen, name: str) -> float:
    """A tap that the reference does not have has no bound; its rows are padding or parts."""
    return float("inf") if seen.truth is None else seen.truth.bounds.get(name, float("inf"))


def _same_experts(ours: list[Mapping[str, Captured]], theirs: list[Mapping[str, Captured]]) -> bool:
    return all(
        name in other and torch.equal(tap.value, other[name].value)
        for mine, other in zip(ours, theirs, strict=True)
        for name, tap in mine.items()
        if name.endswith(".experts_chosen")
    )


def _delta(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    delta = (a.double() - b.double()).abs()
    return f"largest difference {float(delta.max()) if delta.numel() else 0.0:.3g}"


def _broken(error: SimError) -> Judgement:
    return Judgement(checks=[broken(error)], taps=[])


def _headline(judged: Judgement, broke: bool) -> tuple[str, str, str] | None:
    """Of an error the place is left out: which rank is told of first is the scheduler's choice."""
    verdict: Any = judged.headline
    if verdict is None:
        return None
    return verdict.name, verdict.kind, "" if broke else verdict.at

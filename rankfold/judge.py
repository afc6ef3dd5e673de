"""All checks of one step, as verdicts in the order in which a person should read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model.taps import Captured
from properties import TapVerdict, Verdict, compare_taps, same_across_ranks, same_across_stages
from properties.aliasing import inputs_survive
from properties.headline import broken, headline, oracle, sanitizer
from properties.metamorphic import rows_stay
from properties.poison import no_poison
from properties.relations import Relation
from rankfold import verdicts
from rankfold.known import KNOWN, Known, known_of
from rankfold.options import Options
from rankfold.run import Outcome
from rankfold.truth import Truth


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the checks say of one step."""

    checks: list[Verdict]
    taps: list[TapVerdict]
    """Every tap against the reference, in program order."""
    known: dict[str, Known] = field(default_factory=dict)
    """Known findings by tap, where they were set aside; no check speaks of these taps."""

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def headline(self) -> Verdict | None:
        """The first violation in program order; None if there is none."""
        return headline(self.checks, self.taps)


@dataclass(frozen=True, kw_only=True)
class Related:
    """A metamorphic relation of the step's batch, and the steps of its derived batches."""

    relation: Relation
    outcomes: Sequence[Outcome]
    bounds: Sequence[Mapping[str, float]] | None
    """Of each derived batch; None to compare only what has to keep its bits."""


def judge(
    options: Options,
    outcome: Outcome,
    truth: Truth,
    *,
    related: Sequence[Related] = (),
    set_known_aside: bool = False,
) -> Judgement:
    """Apply every check to one step.

    Args:
        options: what ran.
        outcome: the step; where it broke, its taps until then are judged.
        truth: the reference's taps for it.
        related: metamorphic relations whose steps ran as well.
        set_known_aside: whether to leave taps out that show a known finding (see `known.py`).
    """
    topology = options.topology
    ran = truth.taps
    captured: Sequence[Mapping[str, Captured]] = outcome.captured
    if outcome.broke is not None:
        ran = {name: value for name, value in ran.items() if outcome.recorded_whole(name)}
    taps = compare_taps(topology, captured, ran, truth.bounds, truth.parts, truth.sources)
    known: dict[str, Known] = {}
    if set_known_aside and any(each.possible(options) for each in KNOWN):
        known = known_of(options, _wrong(options, captured, taps))
        taps = [tap for tap in taps if tap.name not in known]
        captured = _without(known, captured)
    # From causes to what they do: among checks about the same place the first one is read first.
    checks = [outcome.parameters] if outcome.parameters is not None else []
    checks.append(verdicts.sequence_parallel(options, outcome))
    checks.append(inputs_survive([result.overwritten for result in outcome.results]))
    checks.append(verdicts.routing(truth))
    if options.tiny.sparse_layers:
        checks.append(verdicts.selection(truth, taps))
    checks += _values(options, captured, taps)
    if outcome.broke is not None:
        checks.append(broken(outcome.broke))
    else:
        checks.append(same_across_ranks(topology, captured))
        checks.append(same_across_stages(topology, captured))
        checks.extend(_rows_stay(options, truth, captured, of, known) for of in related)
        checks.append(verdicts.agreement(outcome.ledger))
    if outcome.findings is not None:
        checks.append(sanitizer(outcome.findings))
    return Judgement(checks=checks, taps=taps, known=known)


def _wrong(
    options: Options, captured: Sequence[Mapping[str, Captured]], taps: Sequence[TapVerdict]
) -> list[tuple[str, str]]:
    """The wrong taps, each with its class of fault, by their values and by comparing the ranks."""
    wrong = [(tap.name, tap.kind) for tap in taps if not tap.ok]
    names = {name for name, _ in wrong}
    while True:
        left = [{n: t for n, t in of_rank.items() if n not in names} for of_rank in captured]
        ranks = same_across_ranks(options.topology, left)
        if ranks.ok:
            return wrong
        wrong.append((ranks.at, ranks.kind))
        names.add(ranks.at)


def _values(
    options: Options, captured: Sequence[Mapping[str, Captured]], taps: Sequence[TapVerdict]
) -> list[Verdict]:
    """The oracle and poison. Poison is no number, so right values need no closer look; and it is
    the cause only where the first wrong value is wrong by being no number."""
    values = oracle(taps)
    if values.ok:
        what = "no uninitialised memory and no padding row reaches a token's row"
        return [Verdict(name="poison", ok=True, what=what), values]
    poison = no_poison(options.topology, options.tokens, captured)
    return [poison, values] if values.kind == "not finite" else [values, poison]


def _rows_stay(
    options: Options,
    truth: Truth,
    captured: Sequence[Mapping[str, Captured]],
    related: Related,
    known: Mapping[str, Known],
) -> Verdict:
    for outcome in related.outcomes:
        if outcome.broke is not None:
            return broken(outcome.broke)
    return rows_stay(
        related.relation,
        options.topology,
        captured,
        [_without(known, outcome.captured) for outcome in related.outcomes],
        grouped_experts=options.mega,
        bounds=None if related.bounds is None else [truth.bounds, *related.bounds],
    )


def _without(
    names: Mapping[str, object], captured: Sequence[Mapping[str, Captured]]
) -> Sequence[Mapping[str, Captured]]:
    if not names:
        return captured
    return [{name: tap for name, tap in taps.items() if name not in names} for taps in captured]

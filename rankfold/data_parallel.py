"""`rankfold check` where DP ranks have tokens of their own: each has a truth of its own.

All ranks run one step together. It is then judged once for each DP rank, with the taps of that
rank's TP x PP ranks alone, and the verdicts are put together: taps are named "dp3.layers.0.ffn".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from model.batch import Batch
from model.subject import StepResult
from properties import TapVerdict, Verdict
from properties.headline import broken
from properties.relations import Relation, tokens_changed
from rankfold import report, verdicts
from rankfold.judge import Judgement, Related, judge
from rankfold.options import Options
from rankfold.ready import ready_rig
from rankfold.relate import RELATIONS, possible, relate
from rankfold.rig import Rig
from rankfold.run import Outcome, Progress
from rankfold.serving.plan import decode_first
from rankfold.truth import Truth, truth_of
from sim import Schedule, SimError

Batches = tuple[Batch, ...]
"""A batch for each DP rank."""

_WHOLE = ("parameters", "sequence parallelism", "ledger", "delivery", "run", "sanitizer")
"""Checks that are about all ranks at once."""


def batches_of(options: Options) -> Batches:
    """Each DP rank's batch, drawn from the seed."""
    made = []
    for dp_rank, tokens in enumerate(options.tokens_by_dp_rank):
        sequences = max(1, min(options.sequences, tokens))
        seed = options.seed + 1000 * dp_rank
        batch = Batch.random(tokens, options.tiny.vocab_size, seed, sequences)
        if options.attention != "dense":
            batch = Batch.of(batch.token_ids, decode_first(batch.seq_lens))
        made.append(batch)
    return tuple(made)


def check_dp_step(
    options: Options,
    progress: Progress,
    *,
    batches: Batches | None = None,
    schedule: Schedule | None = None,
    fault: str | None = None,
) -> report.Report:
    """Run one step of all DP ranks with all checks.

    Args:
        options: the model and its topology.
        progress: told what is being done.
        batches: of the DP ranks; drawn from the seed by default.
        schedule: of folded ranks and messages; the plain one by default.
        fault: the name of a fault to switch on.

    Raises:
        As `rankfold.check.run_check`.
    """
    started = time.perf_counter()
    batches = batches or batches_of(options)
    with ready_rig(options, progress, fault) as rig:
        outcome = rig.step(options, batches, progress, schedule)
        progress("computing the references in float64")
        judged, truths = judged_step(rig, options, batches, outcome, progress)
        checks, against = judged.checks, None
        if outcome.broke is None and options.against is not None:
            verdict, against = _against(rig, options, batches, outcome, truths, progress)
            checks.append(verdict)
    return report.Report(
        **report.about(options),
        tokens=sum(batch.tokens for batch in batches),
        tokens_by_dp_rank=[batch.tokens for batch in batches],
        subject=report.Subject(**outcome.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=judged.taps,
        ledger=verdicts.traffic(outcome.ledger),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        broke=outcome.broke.to_json() if outcome.broke is not None else None,
        sequences=options.sequences,
    )


def judged_step(
    rig: Rig,
    options: Options,
    batches: Batches,
    outcome: Outcome,
    progress: Progress = lambda text: None,
) -> tuple[Judgement, list[Truth]]:
    """What the checks say of a step, and the truth of each DP rank.

    Where it came to its end, the metamorphic relations of the batches run too.
    """
    truths = [_truth(rig, options, batches, outcome, d) for d in range(len(batches))]
    related: list[list[Related]] = [[] for _ in batches]
    if outcome.broke is None:
        related = _related(rig, options, batches, progress)
    return judged_together(options, batches, outcome, truths, related), truths


def judged_together(
    options: Options,
    batches: Batches,
    outcome: Outcome,
    truths: Sequence[Truth],
    related: Sequence[Sequence[Related]],
    *,
    set_known_aside: bool = False,
) -> Judgement:
    """What the checks say of a step, judged once for each DP rank.

    Args:
        options: of all DP ranks.
        batches, truths, related: of each.
        outcome: of all.
        set_known_aside: as in `rankfold.judge.judge`.
    """
    judged = [
        judge(
            of_rank(options, batch),
            view(outcome, dp_rank),
            truths[dp_rank],
            related=related[dp_rank],
            set_known_aside=set_known_aside,
        )
        for dp_rank, batch in enumerate(batches)
    ]
    return Judgement(
        checks=merged_checks(judged, [batch.tokens for batch in batches]),
        taps=merged_taps([each.taps for each in judged]),
        known={
            f"dp{dp_rank}.{tap}": known
            for dp_rank, each in enumerate(judged)
            for tap, known in each.known.items()
        },
    )


def examine(rig: Rig, options: Options) -> tuple[Judgement, Outcome | None]:
    """What the checks say of one step of all DP ranks, and the step unless building broke."""
    batches = batches_of(options)
    try:
        outcome = rig.step(options, batches)
    except SimError as error:
        return Judgement(checks=[broken(error)], taps=[]), None
    return judged_step(rig, options, batches, outcome)[0], outcome


def view(outcome: Outcome, dp_rank: int) -> Outcome:
    """The outcome with what the ranks of one DP rank have; the others have nothing."""
    topology = outcome.topology
    results = [
        result if topology.coordinates(rank)["dp"] == dp_rank else StepResult(stage=result.stage)
        for rank, result in enumerate(outcome.results)
    ]
    return replace(outcome, results=results)


def merged_taps(by_dp_rank: Sequence[Sequence[TapVerdict]]) -> list[TapVerdict]:
    """All DP ranks' taps in program order, each tap of all ranks together."""
    order = list(dict.fromkeys(tap.name for taps in by_dp_rank for tap in taps))
    named = [{tap.name: tap for tap in taps} for taps in by_dp_rank]
    return [
        replace(of_rank[name], name=f"dp{dp_rank}.{name}")
        for name in order
        for dp_rank, of_rank in enumerate(named)
        if name in of_rank
    ]


def merged_checks(judged: Sequence[Judgement], tokens: Sequence[int]) -> list[Verdict]:
    """One verdict of each name: the first violated in program order, or else what holds.

    Args:
        judged: of each DP rank.
        tokens: that each has.
    """
    order = {tap.name: i for of_rank in judged for i, tap in enumerate(of_rank.taps)}
    by_name: dict[str, list[tuple[int, Verdict]]] = {}
    for dp_rank, of_rank in enumerate(judged):
        for check in of_rank.checks:
            by_name.setdefault(check.name, []).append((dp_rank, check))
    return [_merged(name, found, order, tokens) for name, found in by_name.items()]


def _merged(
    name: str,
    found: Sequence[tuple[int, Verdict]],
    order: Mapping[str, int],
    tokens: Sequence[int],
) -> Verdict:
    if name in _WHOLE:
        return next((check for _, check in found if not check.ok), found[0][1])
    failed = [(dp_rank, check) for dp_rank, check in found if not check.ok]
    if not failed:
        said = {check.what for _, check in found}
        most, check = max(found, key=lambda pair: tokens[pair[0]])
        which = f"each of {len(tokens)} DP ranks" if len(said) == 1 else f"DP rank {most}"
        return replace(check, what=f"{check.what} ({which})")
    dp_rank, first = min(failed, key=lambda pair: order.get(pair[1].at, len(order)))
    others = [other for other, _ in failed if other != dp_rank]
    more = f"; also on DP ranks {others}" if others else ""
    prefix = f"dp{dp_rank}."
    return replace(
        first,
        what=f"DP rank {dp_rank}: {first.what}",
        where=prefix + first.where,
        why=first.why + more,
        at=prefix + first.at,
    )


def of_rank(options: Options, batch: Batch) -> Options:
    """As if a DP rank's batch were all that ran."""
    return replace(
        options, tokens=batch.tokens, dp_tokens=(), sequences=max(1, len(batch.seq_lens))
    )


def _truth(rig: Rig, options: Options, batches: Batches, outcome: Outcome, dp_rank: int) -> Truth:
    batch = batches[dp_rank]
    return truth_of(of_rank(options, batch), rig.weights(options), batch, view(outcome, dp_rank))


def _related(
    rig: Rig, options: Options, batches: Batches, progress: Progress
) -> list[list[Related]]:
    """For each DP rank the relations of its batch, with the steps in which they ran.

    Tokens change on every other DP rank, and then on the rest: the ranks between, whose own tokens
    stay, must not notice. The other relations change all DP ranks at once.
    """
    related: list[list[Related]] = [[] for _ in batches]
    for parity in range(2):
        relations = [
            tokens_change(options, batch)
            if dp_rank % 2 == parity and batch.tokens
            else others_change(batch)
            for dp_rank, batch in enumerate(batches)
        ]
        _run(rig, options, relations, related, progress)
    for name in RELATIONS[1:]:
        fits = [possible(name, batch.tokens, len(batch.seq_lens)) for batch in batches]
        if any(fits):
            made = [
                relate(name, batch, options.tiny.vocab_size) if fit else others_change(batch)
                for batch, fit in zip(batches, fits, strict=True)
            ]
            _run(rig, options, made, related, progress, judged=fits)
    return related


def tokens_change(options: Options, batch: Batch) -> Relation:
    """The tokens of a DP rank change."""
    return tokens_changed(batch, batch.tokens // 2, options.tiny.vocab_size)


def others_change(batch: Batch) -> Relation:
    """Those of other DP ranks do, and its own must not notice."""
    return Relation(
        change="other DP ranks' tokens change",
        base=batch,
        derived=(batch,),
        rows=(tuple((row, row) for row in range(batch.tokens)),),
        in_place=True,
    )


def _run(
    rig: Rig,
    options: Options,
    relations: Sequence[Relation],
    related: list[list[Related]],
    progress: Progress,
    judged: Sequence[bool] | None = None,
) -> None:
    """Run the derived batches of all DP ranks, and add what is to be judged to `related`."""
    steps = max(len(relation.derived) for relation in relations)
    nothing = Batch.of([], [0])
    outcomes = [
        rig.step(
            options,
            tuple(r.derived[i] if i < len(r.derived) else nothing for r in relations),
            progress,
        )
        for i in range(steps)
    ]
    for dp_rank, relation in enumerate(relations):
        if judged is not None and not judged[dp_rank]:
            continue
        mine = [view(outcome, dp_rank) for outcome in outcomes[: len(relation.derived)]]
        bounds = None
        if (options.mega or not relation.in_place) and all(o.broke is None for o in outcomes):
            bounds = [
                truth_of(of_rank(options, batch), rig.weights(options), batch, seen).bounds
                for batch, seen in zip(relation.derived, mine, strict=True)
            ]
        related[dp_rank].append(Related(relation=relation, outcomes=mine, bounds=bounds))


def _against(
    rig: Rig,
    options: Options,
    batches: Batches,
    outcome: Outcome,
    truths: Sequence[Truth],
    progress: Progress,
) -> tuple[Verdict, report.Against]:
    """The same batches on another topology, as many DP ranks of it at a time as it has."""
    assert options.against is not None
    # Swapped, so that both have the same model, which has an expert for each rank.
    other = replace(options, topology=options.against, against=options.topology, dp_tokens=())
    nothing = Batch.of([], [0])
    width = options.against.dp
    found: list[tuple[Verdict, report.Against]] = []
    for start in range(0, len(batches), width):
        part = batches[start : start + width]
        ran = rig.step(other, (*part, *[nothing] * (width - len(part))), progress)
        if ran.broke is not None:
            raise ran.broke
        for i, batch in enumerate(part):
            dp_rank = start + i
            bound = truths[dp_rank].bounds["logprobs"]
            mine, theirs = view(outcome, dp_rank), view(ran, i)
            found.append(verdicts.against(of_rank(options, batch), batch, mine, theirs, bound))
    worst = max(found, key=lambda pair: (not pair[0].ok, pair[1].max_abs_delta))
    dp_rank = found.index(worst)
    verdict = replace(worst[0], what=f"DP rank {dp_rank}: {worst[0].what}")
    if not verdict.ok:
        verdict = replace(verdict, where=f"dp{dp_rank}.logprobs", at=f"dp{dp_rank}.logprobs")
    return verdict, worst[1]

"""`rankfold check`: run vLLM's MiniMax-M3 on a topology and judge every tap."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from model.batch import Batch
from rankfold import report, verdicts
from rankfold.data_parallel import check_dp_step
from rankfold.judge import Related, judge
from rankfold.options import Options
from rankfold.ready import ready_rig
from rankfold.relate import RELATIONS, possible, relate
from rankfold.rig import Rig
from rankfold.run import Progress
from rankfold.serving.check import check_requests
from rankfold.serving.plan import decode_first
from rankfold.truth import truth_of
from sim import Schedule

__all__ = ["Options", "check_step", "run_check"]


def run_check(options: Options, progress: Progress) -> report.Report:
    """Run the subject and the reference on a random batch, and compare.

    Args:
        options: what to check.
        progress: told what is being done, for a person who waits.

    Raises:
        UsageError, ShapeError, TopologyError: the input makes no sense.
        SimError: the ranks broke while the model was built. A step that breaks is in the report.
    """
    if options.in_steps:
        return check_requests(options, progress)
    if any(topology.dp > 1 for topology in (options.topology, options.against) if topology):
        return check_dp_step(options, progress)
    batch = Batch.random(options.tokens, options.tiny.vocab_size, options.seed, options.sequences)
    if options.attention != "dense":
        batch = Batch.of(batch.token_ids, decode_first(batch.seq_lens))
    fitting = [n for n in RELATIONS if possible(n, batch.tokens, len(batch.seq_lens))]
    return check_step(options, batch, progress, relations=fitting)


def check_step(
    options: Options,
    batch: Batch,
    progress: Progress,
    *,
    schedule: Schedule | None = None,
    relations: Sequence[str] = (),
    fault: str | None = None,
) -> report.Report:
    """Run one step with all checks.

    Args:
        options: the model and its topology.
        batch: the step's input.
        progress: told what is being done.
        schedule: of folded ranks and messages; the plain one by default.
        relations: metamorphic relations to check beside the step, by name.
        fault: the name of a fault to switch on.

    Raises:
        As `run_check`.
    """
    started = time.perf_counter()
    with ready_rig(options, progress, fault) as rig:
        outcome = rig.step(options, batch, progress, schedule)
        progress("computing the reference in float64")
        truth = truth_of(options, rig.weights(options), batch, outcome)
        related = []
        if outcome.broke is None:
            related = [_related(rig, options, batch, name, progress) for name in relations]
        judged = judge(options, outcome, truth, related=related)
        checks, against = judged.checks, None
        if outcome.broke is None and options.against is not None:
            other = rig.step(replace(options, topology=options.against), batch, progress)
            if other.broke is not None:
                raise other.broke
            verdict, against = verdicts.against(
                options, batch, outcome, other, truth.bounds["logprobs"]
            )
            checks.append(verdict)
    return report.Report(
        **report.about(options),
        tokens=batch.tokens,
        subject=report.Subject(**outcome.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=judged.taps,
        ledger=verdicts.traffic(outcome.ledger),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        broke=outcome.broke.to_json() if outcome.broke is not None else None,
        sequences=options.sequences,
    )


def _related(rig: Rig, options: Options, batch: Batch, name: str, progress: Progress) -> Related:
    """The steps of a relation's batches, with their bounds."""
    relation = relate(name, batch, options.tiny.vocab_size)
    outcomes = [rig.step(options, derived, progress) for derived in relation.derived]
    bounds = [
        truth_of(options, rig.weights(options), derived, outcome).bounds
        for derived, outcome in zip(relation.derived, outcomes, strict=True)
    ]
    return Related(relation=relation, outcomes=outcomes, bounds=bounds)

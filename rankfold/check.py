"""`rankfold check`: run vLLM's MiniMax-M3 on a topology and judge every tap."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from model import overlay
from model.batch import Batch
from model.subject import check, prepare
from properties.faults import find
from rankfold import report, verdicts
from rankfold.errors import UsageError
from rankfold.judge import Related, judge
from rankfold.options import Options
from rankfold.processes import rank_processes
from rankfold.relate import RELATIONS, possible, relate
from rankfold.rig import Rig
from rankfold.run import Progress
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
    batch = Batch.random(options.tokens, options.tiny.vocab_size, options.seed, options.sequences)
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
    # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
    torch.set_num_threads(1)
    for topology in filter(None, (options.topology, options.against)):
        check(options.tiny, topology)
    progress("importing vLLM")
    with ExitStack() as stack:
        processes = None
        if options.transport == "gloo":
            processes = stack.enter_context(rank_processes(fault))
        if processes is None or options.sp == "off":
            prepare()
        if options.sp == "off" and not overlay.needed():
            raise UsageError(
                "--sp off: the installed vLLM has sequence parallelism of its own; use auto"
            )
        if fault is not None and processes is None:
            stack.enter_context(find(fault).apply())
        rig = stack.enter_context(Rig(processes=processes))
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
            verdict, against = verdicts.against(outcome, other, truth.bounds["logprobs"])
            checks.append(verdict)
    return report.Report(
        topology=options.topology.word,
        ranks=options.topology.world_size,
        tokens=batch.tokens,
        seed=options.seed,
        transport=options.transport,
        subject=report.Subject(**outcome.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=judged.taps,
        ledger=verdicts.traffic(outcome.ledger),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        broke=outcome.broke.to_json() if outcome.broke is not None else None,
        dtype=options.dtype,
        layers=options.layers,
        sequences=options.sequences,
        aux=list(options.aux),
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

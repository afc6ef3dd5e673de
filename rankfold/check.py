"""`rankfold check`: run vLLM's MiniMax-M3 on a folded topology and judge every tap."""

from __future__ import annotations

import time

import torch

from model import overlay
from model.batch import Batch
from model.subject import check, prepare
from properties import compare_taps, same_across_ranks, same_across_stages
from rankfold import report, verdicts
from rankfold.errors import UsageError
from rankfold.options import Options
from rankfold.run import Progress, full_checkpoint, run_step
from rankfold.truth import truth_of

__all__ = ["Options", "run_check"]


def run_check(options: Options, progress: Progress) -> report.Report:
    """Run the subject and the reference, and compare.

    Args:
        options: what to check.
        progress: told what is being done, for a person who waits.

    Raises:
        UsageError, ShapeError, TopologyError: the input makes no sense.
        SimError: the ranks broke while the model was built. A step that breaks is in the report.
    """
    started = time.perf_counter()
    # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
    torch.set_num_threads(1)
    for topology in filter(None, (options.topology, options.against)):
        check(options.tiny, topology)
    progress("importing vLLM")
    prepare()
    if options.sp == "off" and not overlay.needed():
        raise UsageError(
            "--sp off: the installed vLLM has sequence parallelism of its own; use auto"
        )
    weights = full_checkpoint(options)
    batch = Batch.random(options.tokens, options.tiny.vocab_size, options.seed, options.sequences)

    outcome = run_step(options, options.topology, weights, batch, progress)
    progress("computing the reference in float64")
    truth = truth_of(options, weights, batch, outcome)
    ran = truth.taps
    if outcome.broke is not None:
        ran = {name: value for name, value in ran.items() if outcome.recorded_whole(name)}
    taps = compare_taps(options.topology, outcome.captured, ran, truth.bounds, truth.bases)
    checks = [verdicts.oracle(taps), verdicts.routing(truth)]
    checks.append(verdicts.sequence_parallel(options, outcome))
    against = None
    if outcome.broke is not None:
        checks.append(verdicts.broken(outcome.broke))
    else:
        checks.append(same_across_ranks(options.topology, outcome.captured))
        checks.append(same_across_stages(options.topology, outcome.captured))
        checks.append(verdicts.agreement(outcome.ledger))
        if options.against is not None:
            other = run_step(options, options.against, weights, batch, progress)
            if other.broke is not None:
                raise other.broke
            verdict, against = verdicts.against(outcome, other, truth.bounds["logprobs"])
            checks.append(verdict)
    return report.Report(
        topology=options.topology.word,
        ranks=options.topology.world_size,
        tokens=options.tokens,
        seed=options.seed,
        transport="folded",
        subject=report.Subject(**outcome.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=taps,
        ledger=verdicts.traffic(outcome.ledger),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        broke=outcome.broke.to_json() if outcome.broke is not None else None,
        dtype=options.dtype,
        layers=options.layers,
        sequences=options.sequences,
        aux=list(options.aux),
    )

"""`rankfold check` of requests: chunks of prompts and decode steps, each with all checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from model.batch import Batch
from rankfold import report, verdicts
from rankfold.judge import Related
from rankfold.options import Options
from rankfold.ready import ready_rig
from rankfold.rig import Rig
from rankfold.run import Outcome, Progress
from rankfold.serving.compare import Run, compare
from rankfold.serving.drive import RunStep, Served, serve
from rankfold.serving.judge import judge_steps
from rankfold.serving.plan import Plan, plan_of
from rankfold.serving.relate import related_steps
from rankfold.serving.request import Request, lengths_of, requests_of
from rankfold.serving.sampling import Sampling
from rankfold.serving.truth import truths_of
from sim import Schedule


def check_requests(options: Options, progress: Progress) -> report.Report:
    """Serve requests that are made from the options, and judge every step.

    Raises:
        As `rankfold.check.run_check`.
    """
    requests = requests_for(options)
    for request in requests:
        request.check(options.tiny)
    plan = plan_for(requests, options)
    tokens = [request.prompt for request in requests]
    return check_plan(options, plan, tokens, progress, sampling=Sampling())


def check_plan(
    options: Options,
    plan: Plan,
    tokens: Sequence[Sequence[int]],
    progress: Progress,
    *,
    sampling: Sampling | None = None,
    schedule: Schedule | None = None,
    relation: bool = True,
    fault: str | None = None,
) -> report.Report:
    """Run a plan's steps with all checks.

    Args:
        options: the model and its topology.
        plan: the steps.
        tokens: of each request; see `rankfold.serving.drive.serve`.
        progress: told what is being done.
        sampling: how tokens are sampled that are not given.
        schedule: of folded ranks and messages; the plain one by default.
        relation: whether to run the steps again with other tokens in one request.
        fault: the name of a fault to switch on.

    Raises:
        As `rankfold.check.run_check`.
    """
    started = time.perf_counter()
    with ready_rig(options, progress, fault) as rig:
        run = on(rig, options, progress, schedule)
        served = serve(run, plan, tokens, sampling)
        related: Sequence[Sequence[Related]] = ()
        if relation and served.whole:
            related = related_steps(run, served, options.tiny.vocab_size)
        progress("computing the reference in float64")
        truths, bounds = truths_of(options, rig.weights(options), served)
        judged = judge_steps(options, served, truths, related=related)
        checks, against = judged.checks, None
        if served.whole and options.against is not None:
            other = replace(options, topology=options.against)
            theirs = serve(on(rig, other, progress), plan, tokens, sampling)
            if theirs.outcomes[-1].broke is not None:
                raise theirs.outcomes[-1].broke
            _, their_bounds = truths_of(other, rig.weights(other), theirs)
            verdict, against = compare(
                Run(options=options, served=served, bounds=bounds),
                Run(options=other, served=theirs, bounds=their_bounds),
                sampling or Sampling(),
            )
            checks.append(verdict)
    last = served.outcomes[-1]
    return report.Report(
        **report.about(options),
        tokens=sum(step.tokens for step in served.steps),
        subject=report.Subject(**last.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=judged.taps,
        ledger=verdicts.traffic(*(outcome.ledger for outcome in served.outcomes)),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        broke=last.broke.to_json() if last.broke is not None else None,
        sequences=len(tokens),
        requests=report_requests(served),
        steps=report_steps(served, judged.steps),
        violated_step=judged.violated,
    )


def requests_for(options: Options) -> tuple[Request, ...]:
    """The requests of a check: of telling lengths, or as many tokens in as many sequences as are
    asked for."""
    vocab = options.tiny.vocab_size
    if options.requests:
        lengths = lengths_of(options.requests, options.tiny, options.seed)
        ids = Batch.random(sum(lengths), vocab, options.seed).token_ids
    else:
        batch = Batch.random(options.tokens, vocab, options.seed, options.sequences)
        lengths, ids = batch.seq_lens, batch.token_ids
    return requests_of(ids.tolist(), lengths, options.decode)


def plan_for(requests: Sequence[Request], options: Options) -> Plan:
    """The plan of some requests."""
    return plan_of(
        [len(request.prompt) for request in requests],
        [request.decode for request in requests],
        chunk=options.chunk,
    )


def on(
    rig: Rig,
    options: Options,
    progress: Progress = lambda text: None,
    schedule: Schedule | None = None,
) -> RunStep:
    """Steps on a rig."""

    def run(batch: Batch) -> Outcome:
        return rig.step(options, batch, progress, schedule)

    return run


def report_requests(served: Served) -> list[report.RequestReport]:
    """What has become of each request."""
    return [
        report.RequestReport(
            prompt=served.tokens[i][:prompt],
            tokens=served.sampled[i],
            prompt_logprobs=served.prompt_logprobs[i],
            logprobs=served.logprobs[i],
        )
        for i, prompt in enumerate(served.plan.prompts)
    ]


def report_steps(served: Served, ok: Sequence[bool]) -> list[report.StepReport]:
    """The steps that ran."""
    return [
        report.StepReport(
            ok=holds,
            tokens=step.tokens,
            parts=[
                {
                    "request": part.request,
                    "start": part.start,
                    "length": part.length,
                    "decode": int(served.plan.is_decode(part)),
                }
                for part in step.parts
            ],
        )
        for step, holds in zip(served.steps, ok, strict=True)
    ]

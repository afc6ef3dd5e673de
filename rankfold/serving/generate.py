"""`rankfold generate`: prompts in, tokens and logprobs out, on one topology or against another.

No check and no reference takes part, but that the ranks agree on the logits; against a topology
that sums in another order the reference says what rounding can explain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from model.batch import Batch
from properties import Verdict
from rankfold import report
from rankfold.errors import UsageError
from rankfold.options import MOST_REQUESTS, Options, one_dp_rank
from rankfold.ready import ready_rig
from rankfold.render import print_checks
from rankfold.rig import Rig
from rankfold.run import Outcome, Progress
from rankfold.serving.check import on, plan_for, report_requests
from rankfold.serving.compare import Run, compare
from rankfold.serving.drive import Served, serve
from rankfold.serving.request import Request
from rankfold.serving.sampling import Sampling
from rankfold.serving.truth import truths_of


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What was generated. The JSON keys are kept stable."""

    topology: str
    ranks: int
    seed: int
    transport: str
    dtype: str
    layers: str
    attention: str
    aux: list[int]
    subject: report.Subject
    requests: list[report.RequestReport]
    steps: int
    seconds: float
    """With vLLM's import and the building of the model."""
    steps_per_second: float | None
    """Of the steps after the first, which builds the model; None if there is none."""
    checks: list[Verdict]
    against: report.Against | None = None
    broke: dict[str, Any] | None = None
    """Why a step did not come to its end, if it did not."""

    @property
    def ok(self) -> bool:
        """Whether the ranks agree, and the other topology if there is one."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON lacks (inf, nan) become strings."""
        return {"ok": self.ok, **report.finite(asdict(self))}


def run_generate(
    options: Options, requests: Sequence[Request], sampling: Sampling, progress: Progress
) -> Generated:
    """Serve requests, and those of the other topology of `options.against`, if there is one.

    Raises:
        UsageError, ShapeError, TopologyError: the input makes no sense.
        SimError: the ranks broke while the model was built, or in the other topology.
    """
    started = time.perf_counter()
    for topology in filter(None, (options.topology, options.against)):
        one_dp_rank(topology, "generation")
    if len(requests) > MOST_REQUESTS:
        raise UsageError(f"{len(requests)} prompts: use 1 to {MOST_REQUESTS}")
    for request in requests:
        request.check(options.tiny)
    plan = plan_for(requests, options)
    prompts = [request.prompt for request in requests]
    with ready_rig(options, progress) as rig:
        ends: list[float] = []
        step = on(rig, options, progress)

        def timed(batch: Batch) -> Outcome:
            outcome = step(batch)
            ends.append(time.perf_counter())
            return outcome

        served = serve(timed, plan, prompts, sampling)
        checks = [_agree(served)]
        against = None
        if served.whole and options.against is not None:
            other = replace(options, topology=options.against)
            theirs = serve(on(rig, other, progress), plan, prompts, sampling)
            if theirs.outcomes[-1].broke is not None:
                raise theirs.outcomes[-1].broke
            progress("computing the reference in float64")
            verdict, against = compare(
                _with_bounds(rig, options, served), _with_bounds(rig, other, theirs), sampling
            )
            checks.append(verdict)
    last = served.outcomes[-1]
    return Generated(
        **report.about(options),
        subject=report.Subject(**last.facts),  # type: ignore[arg-type]
        requests=report_requests(served),
        steps=len(served.outcomes),
        seconds=round(time.perf_counter() - started, 3),
        steps_per_second=round((len(ends) - 1) / (ends[-1] - ends[0]), 1) if ends[1:] else None,
        checks=checks,
        against=against,
        broke=last.broke.to_json() if last.broke is not None else None,
    )


def _with_bounds(rig: Rig, options: Options, served: Served) -> Run:
    _, bounds = truths_of(options, rig.weights(options), served)
    return Run(options=options, served=served, bounds=bounds)


def _agree(served: Served) -> Verdict:
    """All TP ranks of the last stage have the same logits in every step that came to its end."""
    name = "replication"
    if last := served.outcomes[-1].broke:
        return Verdict(
            name=name,
            ok=False,
            what=f"step {len(served.outcomes) - 1} broke: {str(last).splitlines()[0]}",
            where=served.plan.describe(len(served.outcomes) - 1),
            why="see rankfold check with the same options",
            kind=last.kind,
        )
    if served.differ:
        return Verdict(
            name=name,
            ok=False,
            what="logits are not the same on all TP ranks",
            where=served.plan.describe(served.differ[0]),
            why="see rankfold check with the same options",
            kind="ranks differ",
            at="logits",
        )
    steps = len(served.outcomes)
    what = f"all TP ranks have the same logits in {steps} step{'s' if steps > 1 else ''}"
    return Verdict(name=name, ok=True, what=what)


def render(generated: Generated, console: Console) -> None:
    """Print what was generated for a person."""
    console.print(
        f"[bold]{generated.topology}[/]: {generated.ranks} {generated.transport} ranks, layers "
        f"{generated.layers}, {generated.attention} attention, {generated.dtype}, seed "
        f"{generated.seed}"
    )
    for number, request in enumerate(generated.requests):
        console.print(f"request {number}")
        console.print(Text(f"  prompt           {_joined(request.prompt)}"))
        console.print(Text(f"  prompt logprobs  {_rounded(request.prompt_logprobs)}"))
        console.print(Text(f"  tokens           {_joined(request.tokens)}"))
        console.print(Text(f"  logprobs         {_rounded(request.logprobs)}"))
    print_checks(generated.checks, console)
    if generated.against is not None:
        same = "the same tokens" if generated.against.same_tokens else "other tokens"
        console.print(
            f"against {generated.against.topology}: {same}, largest difference of a prompt logprob "
            f"{generated.against.max_abs_delta:.2g}"
        )
    pace = generated.steps_per_second
    rate = "" if pace is None else f", {pace:.0f} steps a second"
    end = f"{generated.topology}: {generated.steps} steps{rate}  ({generated.seconds:.1f} s)"
    console.print(Text(end, "bold green" if generated.ok else "bold red"))


def _joined(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _rounded(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values) or "none"

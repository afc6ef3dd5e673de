"""Serve a load on a deployment with all checks, and on another one to compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from properties import Verdict
from properties.headline import broken
from rankfold import report, verdicts
from rankfold.deployment.drive import Drive, Load, Served, Side
from rankfold.deployment.fleet import Deployment
from rankfold.deployment.judge import Judged, judge_deployment
from rankfold.deployment.relate import related_to
from rankfold.deployment.report import DeploymentReport, FleetReport, HandOvers
from rankfold.deployment.truth import requests_of, truths_of
from rankfold.errors import UsageError
from rankfold.options import Options
from rankfold.ready import ready_rig
from rankfold.rig import Rig
from rankfold.run import Progress
from rankfold.serving.check import report_requests
from rankfold.serving.compare import Run, compare
from sim import SimError


def check_deployment(
    options: Options,
    deployment: Deployment,
    load: Load,
    progress: Progress,
    *,
    against: Deployment | None = None,
    fault: str | None = None,
    notes: Sequence[str] = (),
    recipe: str | None = None,
) -> DeploymentReport:
    """Serve a load and judge every step and every hand-over.

    Args:
        options: the model; the topologies are the deployments'.
        deployment: the workers.
        load: the requests, and what goes wrong with hand-overs.
        progress: told what is being done.
        against: another deployment that serves the same requests, to compare.
        fault: the name of a fault to switch on.
        notes: what the report shall say of a recipe.
        recipe: the recipe's file.

    Raises:
        UsageError, ShapeError, TopologyError: the input makes no sense.
        SimError: the ranks broke while a model was built, or on the other deployment.
    """
    started = time.perf_counter()
    both = [deployment, *([against] if against else [])]
    options = shared(options, both)
    for request in load.requests:
        request.check(options.tiny)
    workers = sum(fleet.workers for each in both for fleet in each.fleets.values())
    with ready_rig(options, progress, fault, worlds=workers) as rig:
        progress(f"serving {len(load.requests)} requests on {deployment}")
        served = Drive(rig, options, deployment, load, progress).run()
        related = related_to(rig, options, served, progress) if served.whole else None
        progress("computing the reference in float64")
        truths = truths_of(rig.weights(options), served)
        judged = judge_deployment(served, truths, related)
        checks, compared = judged.checks, None
        if against is not None and served.whole and truths.bounds is not None:
            progress(f"serving {len(load.requests)} requests on {against}")
            one = Run(
                options=options,
                served=requests_of(served),
                bounds=truths.bounds,
                name=deployment.word,
            )
            verdict, compared = _against(rig, options, one, against, load, progress)
            checks.append(verdict)
    outcomes = [o for side in served.sides for worker in side.workers for o in worker.outcomes]
    broke = next((o.broke for o in outcomes if o.broke is not None), None)
    about = report.about(options)
    return DeploymentReport(
        topology=deployment.word,
        ranks=deployment.ranks,
        tokens=sum(s.tokens for side in served.sides for _, lane in side.lanes for s in lane.steps),
        fleets={side.name: _fleet(side) for side in served.sides},
        **{key: about[key] for key in ("seed", "transport", "dtype", "layers", "attention")},
        subject=report.Subject(**outcomes[-1].facts),  # type: ignore[arg-type]
        requests=report_requests(requests_of(served)),
        checks=checks,
        taps=judged.taps,
        ledger=verdicts.traffic(*(outcome.ledger for outcome in outcomes)),
        steps=judged.steps,
        seconds=round(time.perf_counter() - started, 3),
        hand_overs=_hand_overs(served) if served.prefill is not None else None,
        against=compared,
        broke=broke.to_json() if broke is not None else None,
        notes=list(notes),
        recipe=recipe,
    )


def examine(rig: Rig, options: Options, deployment: Deployment, load: Load) -> Judged:
    """What the checks say of a load on a deployment, but for the metamorphic one."""
    options = shared(options, [deployment])
    try:
        served = Drive(rig, options, deployment, load, lambda text: None).run()
    except SimError as error:
        return Judged(checks=[broken(error)], taps=[], steps=0)
    return judge_deployment(served, truths_of(rig.weights(options), served))


def shared(options: Options, deployments: Sequence[Deployment]) -> Options:
    """Options of a model that all deployments can run."""
    topologies = tuple(dict.fromkeys(t for each in deployments for t in each.topologies))
    if options.mega and not all(t.ep for t in topologies):
        raise UsageError(
            f"{options.moe_backend} needs expert parallelism on every worker; "
            f"{', '.join(t.word for t in topologies if not t.ep)} has none"
        )
    return replace(options, topology=topologies[0], also=topologies, against=None)


def _against(
    rig: Rig,
    options: Options,
    one: Run,
    against: Deployment,
    load: Load,
    progress: Progress,
) -> tuple[Verdict, report.Against]:
    """The same requests on another deployment."""
    served = Drive(rig, options, against, load, progress, prefix="against ").run()
    for side in served.sides:
        for worker in side.workers:
            if worker.outcomes and (broke := worker.outcomes[-1].broke) is not None:
                raise broke
    truths = truths_of(rig.weights(options), served)
    if truths.bounds is None:
        raise RuntimeError(f"{against} did not serve all requests: {served.stopped}")
    other = Run(
        options=options, served=requests_of(served), bounds=truths.bounds, name=against.word
    )
    return compare(one, other, load.sampling, bitwise=False)


def _fleet(side: Side) -> FleetReport:
    return FleetReport(
        topology=side.workers[0].options.topology.word,
        workers=len(side.workers),
        steps=[len(worker.outcomes) for worker in side.workers],
        requests_by_lane={
            lane.name: len({part.request for step in lane.steps for part in step.parts})
            for _, lane in side.lanes
        },
        ledger=verdicts.traffic(*(o.ledger for w in side.workers for o in w.outcomes)),
    )


def _hand_overs(served: Served) -> HandOvers:
    counts, carried = served.counts, served.handing.wire.carried
    return HandOvers(
        whole=counts.whole,
        given_up=counts.given_up,
        pieces=carried.sent,
        bytes=carried.bytes,
        lost=carried.lost,
        late=carried.late,
        repeated=counts.repeated,
        stale=counts.stale,
    )

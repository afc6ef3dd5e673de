"""What the launched ranks do for the job, and what rank 0 writes down of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model import megamoe
from model.batch import Batch
from model.device import current, moved
from properties import Verdict
from rankfold.errors import BROKE, HOLDS
from rankfold.gpu.plan import SP_OFF, SP_ON, Plan, Timing
from rankfold.judge import judge
from rankfold.options import Options
from rankfold.processes import rank_processes
from rankfold.rig import Built, Stand
from rankfold.run import Outcome, full_checkpoint
from rankfold.truth import truth_of
from sim import RankContext, Schedule, SimError
from sim.gloo import wire

_WARM = 3
"""Steps before a measurement."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step of a variant, judged."""

    outcome: Outcome
    failed: Sequence[Verdict]
    """The checks that do not hold."""
    held: int
    """How many hold."""
    bounds: Mapping[str, float]
    """Largest deviation of each tap that rounding explains."""


@dataclass(kw_only=True)
class Record:
    """One launch."""

    transport: str
    devices: list[str] = field(default_factory=list)
    """The name of each rank's device."""
    real_mega_moe: bool = False
    """Whether MegaMoE's own kernels ran."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """By variant."""
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    """For each arm the mean of a step in each of its runs, in milliseconds."""
    broke: str = ""
    """Why the ranks broke, if they did."""


def measure(options: Options, batch: Batch, outcome: Outcome) -> Measured:
    """Judge a step."""
    truth = truth_of(options, full_checkpoint(options), batch, outcome)
    checks = judge(options, outcome, truth).checks
    failed = [verdict for verdict in checks if not verdict.ok]
    return Measured(
        outcome=outcome,
        failed=failed,
        held=len(checks) - len(failed),
        bounds=truth.bounds,
    )


def batch_of(options: Options) -> Batch:
    """The batch of the compared step."""
    return Batch.random(options.tokens, options.tiny.vocab_size, options.seed, options.sequences)


def record(plan: Plan, transport: str, out: Path) -> int:
    """Run a plan on the launched ranks, and write the record to a file.

    Returns:
        The exit code: 0 if there is a whole record, whatever it says; 3 if the ranks broke.
    """
    kept = Record(transport=transport)
    try:
        with rank_processes() as processes:
            stand = Stand(plan.topology, len(plan.variants), processes)
            try:
                _fill(kept, stand, plan)
            finally:
                stand.close()
    except SimError as error:
        kept.broke = str(error)
    out.write_bytes(wire.dump(kept))
    return BROKE if kept.broke else HOLDS


def load(path: Path) -> Record:
    """A record that was written by `record` on this machine."""
    loaded: Record = wire.load(path.read_bytes())
    return loaded


def _fill(kept: Record, stand: Stand, plan: Plan) -> None:
    kept.devices = stand.world.run(device_name)
    kept.real_mega_moe = megamoe.real_deep_gemm()
    models: dict[str, Built] = {}
    for name, options in plan.variants:
        built = models[name] = stand.built(options, full_checkpoint(options))
        stand.world.ledger.clear()
        batch = batch_of(options)
        results = stand.step(built, batch, options.aux, Schedule())
        outcome = Outcome(
            topology=plan.topology,
            results=list(results),
            ledger=stand.world.ledger.copy(),
            facts=built.facts,
            findings=None,
            parameters=built.parameters,
        )
        kept.measured[name] = measure(options, batch, outcome)
    if plan.timing is not None and {SP_ON, SP_OFF} <= models.keys():
        options = dict(plan.variants)[SP_ON]
        kept.step_ms = _times(stand, models, options, plan.timing)


def _times(
    stand: Stand, models: Mapping[str, Built], options: Options, timing: Timing
) -> dict[str, list[float]]:
    batch = Batch.random(timing.tokens, options.tiny.vocab_size, options.seed)
    times: dict[str, list[float]] = {SP_ON: [], SP_OFF: []}
    for _ in range(timing.runs):
        for arm, runs in times.items():
            taken = stand.world.run(time_model, models[arm].number, batch, timing.steps)
            runs.append(max(taken) * 1e3)
    return times


# --- what a rank is asked to do ---


def device_name(ctx: RankContext) -> str:
    """The name of this rank's device."""
    device = current()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def time_model(ctx: RankContext, number: int, batch: Batch, steps: int) -> float:
    """Seconds of a step of a model that this rank keeps, without taps, in the mean."""
    subject: Any = ctx.kept[number]
    subject.capture_aux(())
    there = moved(batch)
    for _ in range(_WARM):
        subject.step(there, capture=False)
    _synchronise()
    start = time.perf_counter()
    for _ in range(steps):
        subject.step(there, capture=False)
    _synchronise()
    return (time.perf_counter() - start) / steps


def _synchronise() -> None:
    if current().type == "cuda":
        torch.cuda.synchronize()

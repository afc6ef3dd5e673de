"""The job: looks, launches what can run, compares, reads, and says what it did not run and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rankfold.gpu import inventory
from rankfold.gpu.fullscale import MODEL, commands
from rankfold.gpu.judged import full_scale
from rankfold.gpu.readers import read
from rankfold.gpu.report import Ran, Report
from rankfold.gpu.rows import Row, not_run, passed
from rankfold.gpu.thresholds import Thresholds
from sim import SimError

if TYPE_CHECKING:
    from rankfold.gpu.launch import Launched
    from rankfold.gpu.plan import Plan

LIMIT = 600.0
"""Seconds for one launch."""
_TRANSPORTS = {"nccl": "NCCL", "gloo-gpu": "gloo on shared GPUs", "gloo": "gloo on the CPU"}
_NOT_READ = (
    f"needs the weights of {MODEL}; run the commands below, then give their files with --read"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do."""

    folder: Path
    """Where the report and the logs go."""
    topologies: Sequence[str] | None = None
    """Words; None is all of `plan.TOPOLOGIES`."""
    device: str = "auto"
    """"auto" runs only where there is a GPU; "cpu" runs the same over gloo without any."""
    attention: str = "dense"
    files: Sequence[str] = ()
    """Results of full-scale runs."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    timing: bool = True
    limit: float = LIMIT


def run_job(job: Job, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Do it.

    Raises:
        UsageError, ShapeError, TopologyError: a file cannot be read, or a topology makes no sense.
    """
    started = time.monotonic()
    found = [each for given in job.files for each in read(given)]
    job.folder.mkdir(parents=True, exist_ok=True)
    progress("looking at this machine")
    machine = inventory.look()
    rows: list[Row] = []
    launches: list[Ran] = []
    for row, ran in _launches(job, machine, progress):
        rows += row
        launches += ran
    rows += _kernels(machine, rows)
    rows += full_scale(found, job.thresholds, _NOT_READ)
    return Report(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine,
        rows=rows,
        launches=launches,
        commands=commands(),
        seconds=round(time.monotonic() - started, 1),
        thresholds=asdict(job.thresholds),
    )


def _launches(
    job: Job, machine: inventory.Inventory, progress: Callable[[str], None]
) -> Iterator[tuple[list[Row], list[Ran]]]:
    if machine.vllm is None:
        yield [not_run("runs over NCCL", "vLLM is not installed")], []
        return
    from rankfold.gpu.plan import TOPOLOGIES, Timing, plans, transport_of

    timing = Timing.brief() if job.device == "cpu" else Timing()
    planned = plans(job.topologies or TOPOLOGIES, job.attention, timing if job.timing else None)
    gpus = 0 if job.device == "cpu" else len(machine.gpus)
    yield [_over_nccl(plan, gpus, job.device) for plan in planned if not _nccl(plan, gpus)], []
    if not gpus and job.device != "cpu":
        return
    done: dict[tuple[str, str], Launched] = {}
    for plan in planned:
        transport = transport_of(plan.topology, gpus)
        progress(f"{plan.topology} over {_TRANSPORTS[transport]}")
        yield _one(job, plan, transport, done)


def _nccl(plan: Plan, gpus: int) -> bool:
    return 0 < plan.topology.world_size <= gpus


def _over_nccl(plan: Plan, gpus: int, device: str) -> Row:
    wanted = plan.topology.world_size
    why = (
        "the CPU was asked for"
        if device == "cpu"
        else f"needs {wanted} CUDA GPU{'s' * (wanted > 1)}, this machine has {gpus}"
    )
    return not_run(f"{plan.topology} over NCCL", why)


def _one(
    job: Job, plan: Plan, transport: str, done: dict[tuple[str, str], Launched]
) -> tuple[list[Row], list[Ran]]:
    """Launch one plan, run it folded as well, and compare."""
    from rankfold.gpu import compare
    from rankfold.gpu.folded import folded
    from rankfold.gpu.launch import launch

    device = "cpu" if transport == "gloo" else "cuda"
    launched = launch(plan, device, job.folder, job.limit)
    done[plan.topology.word, transport] = launched
    record = launched.record
    name = f"{plan.topology} over {_TRANSPORTS[transport]}"
    ran = Ran(
        topology=plan.topology.word,
        transport=transport,
        devices=[] if record is None else record.devices,
        exit_code=launched.code,
        seconds=launched.seconds,
        broke=launched.why if record is None else record.broke,
        log=str(launched.log),
    )
    if record is None:
        return [passed(name, False, launched.why)], [ran]
    try:
        of_folded = folded(plan)
    except SimError as error:
        return [passed(name, False, f"the folded ranks broke: {error.headline}")], [ran]
    rows = [*compare.agreement(plan, name, record, of_folded)]
    alone = done.get((plan.alone.word, transport))
    rows += compare.stages(plan, name, record, None if alone is None else alone.record)
    rows += compare.step_times(plan, name, record)
    return rows, [ran]


def _kernels(machine: inventory.Inventory, rows: Sequence[Row]) -> list[Row]:
    """Whose kernels ran."""
    name = "real MegaMoE (SM100)"
    ran = [row for row in rows if "over NCCL, MegaMoE" in row.name]
    if machine.real_mega_moe:
        mega = not_run(name, machine.real_mega_moe)
    elif not ran:
        mega = not_run(name, "no topology with MegaMoE ran over NCCL")
    else:
        bad = [row.name for row in ran if row.verdict == "FAIL"]
        said = f"{bad[0]} fails" if bad else f"{len(ran)} rows over NCCL ran with its kernels"
        mega = passed(name, not bad, said)
    compiled = (
        "the job's tiny model runs torch leaf kernels on every device; vLLM's own run at full scale"
    )
    if machine.compiled_kernels:
        compiled = f"{machine.compiled_kernels}; torch leaf kernels run in their place"
    return [mega, not_run("vLLM's compiled leaf kernels", compiled)]

"""The whole matrix: all faults and controls, on workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from model.subject import prepare
from properties.faults import FAULTS, Fault, find
from properties.faults.controls import CONTROLS, Control
from rankfold.errors import UsageError
from rankfold.examiner import References
from rankfold.faults.trial import Trial, try_fault, unfit
from rankfold.hunt.workers import Link, run_workers
from rankfold.options import TRANSPORTS
from rankfold.processes import new_pool
from sim import Topology


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What the checks made of a negative control."""

    control: Control
    flagged: bool
    """Whether a check called it wrong on one of its topologies. That must not be."""
    noted: str
    """What the sanitizer says of its operations, if anything."""
    waste: float
    """Bytes moved, as a multiple of what its lean twin moves."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All trials."""

    trials: Sequence[Trial]
    controls: Sequence[Cleared]
    seconds: float
    transport: str = "folded"
    not_run: Sequence[tuple[Fault, str]] = ()
    """Faults that the transport cannot show, each with the reason."""

    @property
    def ok(self) -> bool:
        """Whether every fault is caught, and no control is flagged."""
        return all(t.caught for t in self.trials) and not any(c.flagged for c in self.controls)

    def share(self, right: Callable[[Trial], bool]) -> float:
        """The share of the faults of which something holds."""
        return sum(map(right, self.trials)) / len(self.trials) if self.trials else 1.0

    @property
    def median_seconds(self) -> float:
        """Of the time to detect."""
        taken = sorted(trial.seconds for trial in self.trials if trial.caught)
        return taken[len(taken) // 2] if taken else 0.0


def run_matrix(
    names: Sequence[str],
    workers: int,
    progress: Callable[[str], None] = lambda text: None,
    *,
    transport: str = "folded",
) -> Matrix:
    """Try the faults of these names, or all faults and controls.

    Args:
        names: of faults.
        workers: how many processes try them; over gloo each has ranks of its own.
        progress: told what is being done.
        transport: what the ranks are. Over gloo only what processes can show is tried; the
            controls are programs for folded ranks.

    Raises:
        UsageError: the transport is none.
        UnknownFault: a name that no fault has.
        WorkerDied: a worker process ended.
    """
    if transport not in TRANSPORTS:
        raise UsageError(f"--transport {transport!r}: use {', '.join(TRANSPORTS)}")
    over_gloo = transport == "gloo"
    named: Sequence[Fault] = [find(name) for name in names] if names else [*FAULTS.values()]
    not_run = [(fault, why) for fault in named if over_gloo and (why := unfit(fault))]
    left_out = {fault.name for fault, _ in not_run}
    faults = [fault for fault in named if fault.name not in left_out]
    controls = [] if names or over_gloo else [*CONTROLS]
    started = time.monotonic()
    torch.set_num_threads(1)
    progress("importing vLLM")
    if not over_gloo:
        prepare()
    places: dict[int, Trial] = {}
    cleared: dict[int, Cleared] = {}

    def job(link: Link, number: int) -> None:
        references = References()
        with new_pool() if over_gloo else nullcontext() as pool:
            for place in range(number, len(faults), workers):
                if link.stopped():
                    return
                link.send((place, _plain(try_fault(faults[place], references, pool))))
        for place in range(number, len(controls), workers):
            control = controls[place]
            judged = [control.judge(Topology.parse(word)) for word in control.topologies]
            link.send(
                (
                    place,
                    {
                        "flagged": any(each.flagged for each in judged),
                        "noted": next((each.noted for each in judged if each.noted), ""),
                        "waste": max(each.waste for each in judged),
                    },
                )
            )

    def hear(message: object) -> None:
        assert isinstance(message, tuple)
        place, data = message
        if "flagged" in data:
            cleared[place] = Cleared(control=controls[place], **data)
        else:
            places[place] = Trial(fault=faults[place], **data)
        progress(f"{len(places)} of {len(faults)} faults, {len(cleared)} controls")

    run_workers(max(1, min(workers, len(faults) or 1)), job, hear)
    return Matrix(
        trials=[places[place] for place in sorted(places)],
        controls=[cleared[place] for place in sorted(cleared)],
        seconds=time.monotonic() - started,
        transport=transport,
        not_run=not_run,
    )


def _plain(trial: Trial) -> dict[str, object]:
    """A trial without its fault, whose functions do not travel between processes."""
    return {name: value for name, value in vars(trial).items() if name != "fault"}

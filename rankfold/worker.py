"""`rankfold worker`: a command on ranks that torchrun has started, on CPUs or GPUs.

Every process is a rank. Rank 0's process also drives: it runs the command as `--transport gloo`
would, on the launched ranks in place of forked ones, judges with the same checks, and prints the
same report.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from model import device
from model.subject import prepare
from rankfold.errors import BROKE, UsageError
from rankfold.processes import launched
from sim import Topology
from sim.launched import Launch, LaunchedPool, end_now, linger, serve
from sim.launched.fabric import DeviceFabric

DEVICES = ("auto", "cpu", "cuda")
_MEET = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    device: torch.device
    transport: str
    """"gloo", "nccl", or "gloo-gpu" for ranks that share a GPU."""

    @classmethod
    def of(cls, launch: Launch, asked: str, gpus: int) -> Place:
        """The place of a rank.

        Args:
            launch: the rank.
            asked: one of `DEVICES`; "auto" is a GPU where there is one.
            gpus: of this machine.

        Raises:
            UsageError: a GPU is asked for where there is none, or something unknown.
        """
        if asked not in DEVICES:
            raise UsageError(f"--device {asked!r}: use {', '.join(DEVICES)}")
        if asked == "cuda" and not gpus:
            raise UsageError("--device cuda: this machine has no CUDA GPU; use cpu")
        if asked == "cpu" or not gpus:
            return cls(device=torch.device("cpu"), transport="gloo")
        return cls(
            device=torch.device("cuda", launch.local_rank % gpus),
            transport="nccl" if launch.local_size <= gpus else "gloo-gpu",
        )


def run_worker(
    topology: str, asked: str, command: Callable[[Place], int], environment: Any = os.environ
) -> int:
    """Be a rank of a launch, and on rank 0 run the command.

    Args:
        topology: its word; it has to have as many ranks as were launched.
        asked: the device; see `Place.of`.
        command: what rank 0 does; returns the exit code.
        environment: what torchrun has set.

    Returns:
        The command's exit code; 0 on other ranks, which are told when to end.

    Raises:
        LaunchError, UsageError, TopologyError: this is no launch, or not of this size.
    """
    launch = Launch.of(environment)
    wanted = Topology.parse(topology)
    if wanted.world_size != launch.world_size:
        if launch.rank:
            return 0  # one rank says it
        raise UsageError(
            f"{wanted} has {wanted.world_size} ranks, and torchrun has started "
            f"{launch.world_size}: use --nproc-per-node {wanted.world_size} on one machine"
        )
    place = Place.of(launch, asked, torch.cuda.device_count())
    linger(launch.rank)
    store = _store(launch)
    device.use(place.device)
    be_rank = functools.partial(
        serve,
        launch,
        store,
        fabric=functools.partial(
            DeviceFabric, nccl=place.transport == "nccl", one_machine=launch.one_machine
        ),
        backend="nccl" if place.transport == "nccl" else "gloo",
        begin=functools.partial(device.use, place.device),
    )
    if launch.rank:
        # The terminal's Ctrl-C is rank 0's business.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        prepare()
        be_rank()
        return 0
    return _drive(launch, store, place, be_rank, command)


def _drive(
    launch: Launch,
    store: Any,
    place: Place,
    be_rank: Callable[[], None],
    command: Callable[[Place], int],
) -> int:
    machines = "this machine" if launch.one_machine else "several machines"
    print(
        f"rankfold worker: {launch.world_size} ranks on {machines}, {place.device.type}, over "
        f"{place.transport}",
        file=sys.stderr,
    )
    with LaunchedPool(launch, store) as pool:
        prepare()
        threading.Thread(target=_or_end, args=(be_rank,), name="rank0", daemon=True).start()
        with launched(pool):
            code = command(place)
        broken = pool.broken
    if broken:
        end_now(code)  # its own rank may be stuck in an operation for ever
    return code


def _or_end(be_rank: Callable[[], None]) -> None:
    """Be a rank; the driver would wait for ever for one that could not even connect."""
    try:
        be_rank()
    except BaseException:
        end_now(BROKE, traceback.format_exc())


def _store(launch: Launch) -> Any:
    """The launcher's store, or one that rank 0 makes at the launcher's address."""
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=_MEET))
    return store

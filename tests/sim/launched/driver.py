"""What torchrun starts in these tests: runs the worlds of a job, and writes down what came of them.

torchrun --nproc-per-node N -m tests.sim.launched.driver JOB OUT
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sim import SimError
from sim.calls import Call
from sim.callsite import CallSites
from sim.gloo import GlooWorld, wire
from sim.gloo.carried import Carried
from sim.gloo.journal import Journal
from sim.launched import Launch, LaunchedPool, end_now, linger, serve
from sim.launched.fabric import DeviceFabric
from sim.launched.staging import staged, staged_post
from sim.mailbox import Post
from tests.sim.launched.jobs import Done, Job


class StagedFabric(DeviceFabric):
    """As if every tensor were on a GPU that the ranks share."""

    def carry(self, transport: Any, call: Call) -> Carried:
        return (
            super().carry(transport, call) if call.op == "barrier" else staged(transport.gloo, call)
        )

    def carry_post(self, transport: Any, post: Post) -> Carried:
        return staged_post(transport.gloo, post)


def main(job_file: str, out_file: str) -> None:
    """A process's life."""
    launch = Launch.of()
    linger(launch.rank)
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size))
    jobs: list[Job] = wire.load(Path(job_file).read_bytes())
    numbers = itertools.count()

    def fabric(journal: Journal, sites: CallSites) -> DeviceFabric:
        make = StagedFabric if jobs[next(numbers)].staged else DeviceFabric
        return make(journal, sites)

    def be_rank() -> None:
        serve(launch, store, fabric=fabric, backend="gloo")

    if launch.rank:
        be_rank()
        return
    done = []
    with LaunchedPool(launch, store) as pool:
        threading.Thread(target=be_rank, daemon=True).start()
        for job in jobs:
            done.append(carried_out(job, pool))
    Path(out_file).write_bytes(wire.dump(done))
    end_now(3 if any(each.kind for each in done) else 0)


def carried_out(job: Job, pool: LaunchedPool) -> Done:
    """Run one world."""
    done = Done()
    with GlooWorld(job.topology, pool=pool, limit=job.limit) as world:
        for program, arguments in job.runs:
            world.ledger.clear()
            try:
                done.results.append(world.run(program, *arguments))
            except SimError as error:
                done.kind, done.said = error.kind, str(error)
                if job.look is not None:
                    done.looked = world.salvage(job.look)
                return done
            done.ledgers.append(list(world.ledger.entries))
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])

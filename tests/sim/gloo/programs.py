"""Programs for rank processes: top-level functions, since they travel by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sim import RankContext
from tests.sim.conformance.gloo_pool import Invocation


def summed(ctx: RankContext) -> torch.Tensor:
    """All-reduce of the ranks' numbers."""
    x = torch.full((2,), float(ctx.rank))
    dist.all_reduce(x)
    return x


def invoke(ctx: RankContext, batch: tuple[Invocation, ...]) -> list[list[torch.Tensor]]:
    """Programs of the conformance suite, one after the other."""
    return [one(ctx.rank, ctx.world_size) for one in batch]


def counted(ctx: RankContext) -> int:
    """How often this was called in this world."""
    ctx.kept["count"] = ctx.kept.get("count", 0) + 1
    return int(ctx.kept["count"])


def many_sums(ctx: RankContext, steps: int) -> float:
    """Sums one after the other, on overlapping groups."""
    pair = dist.new_group([0, 1])
    x = torch.ones(4)
    for _ in range(steps):
        dist.all_reduce(x)
        if ctx.rank < 2:
            dist.all_reduce(x, group=pair)
        x = x / x.max()
    return float(x[0])


def raises_on_one(ctx: RankContext) -> None:
    """Rank 1 raises between two operations."""
    summed(ctx)
    if ctx.rank == 1:
        raise ValueError("one is enough")
    summed(ctx)


def exits_on_one(ctx: RankContext) -> None:
    """Rank 1 ends its process."""
    summed(ctx)
    if ctx.rank == 1:
        os._exit(7)
    summed(ctx)


def killed_on_one(ctx: RankContext) -> None:
    """Rank 1 is killed."""
    summed(ctx)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    summed(ctx)


def hangs_on_one(ctx: RankContext) -> None:
    """Rank 1 never comes back from its own code."""
    summed(ctx)
    if ctx.rank == 1:
        time.sleep(3600)
    summed(ctx)


def works_on_one(ctx: RankContext, seconds: float) -> torch.Tensor:
    """Rank 1 takes its time, the others wait for it: no fault."""
    if ctx.rank == 1:
        time.sleep(seconds)
    return summed(ctx)


def skips_on_one(ctx: RankContext) -> None:
    """Rank 1 leaves an operation out."""
    summed(ctx)
    if ctx.rank != 1:
        summed(ctx)


def crossed_receives(ctx: RankContext) -> None:
    """Ranks 0 and 1 wait for each other's message before they send their own."""
    x = torch.zeros(3)
    if ctx.rank < 2:
        dist.recv(x, src=1 - ctx.rank)
        dist.send(x, dst=1 - ctx.rank)


def longer_on_one(ctx: RankContext) -> None:
    """Rank 1 reduces a longer tensor."""
    dist.all_reduce(torch.ones(5 if ctx.rank == 1 else 4))


def another_operation_on_one(ctx: RankContext) -> None:
    """Rank 1 gathers where the others reduce, and everyone waits for the next sum."""
    x = torch.ones(4)
    if ctx.rank == 1:
        dist.broadcast(x, src=1)
    else:
        dist.all_reduce(x)


def longer_message(ctx: RankContext) -> None:
    """Rank 1 expects more than rank 0 sends."""
    if ctx.rank == 0:
        dist.send(torch.ones(2), dst=1)
    elif ctx.rank == 1:
        dist.recv(torch.ones(3), src=0)


def unreceived(ctx: RankContext) -> None:
    """Rank 0 sends what nobody receives, and does not wait for it."""
    if ctx.rank == 0:
        ctx.kept["work"] = dist.isend(torch.ones(2), dst=1)


def of_another_group(ctx: RankContext) -> None:
    """Rank 2 uses a group that it is not in."""
    pair = dist.new_group([0, 1])
    if ctx.rank == 2:
        dist.all_reduce(torch.ones(1), group=pair)


def result_that_cannot_travel(ctx: RankContext) -> object:
    """A result that no pickle takes."""
    return lambda: ctx.rank


def kept_count(ctx: RankContext) -> int:
    """What `counted` has kept; to be looked at beside a run."""
    return int(ctx.kept.get("count", 0))


def counts_then_raises_on_one(ctx: RankContext) -> None:
    """Rank 1 raises, the others wait for it; all have counted."""
    counted(ctx)
    raises_on_one(ctx)


def environment(ctx: RankContext) -> str | None:
    """What `marked` has set."""
    return os.environ.get("RANKFOLD_TEST_MARK")


@contextmanager
def marked() -> Iterator[None]:
    """Within, an environment variable is set."""
    os.environ["RANKFOLD_TEST_MARK"] = "on"
    try:
        yield
    finally:
        del os.environ["RANKFOLD_TEST_MARK"]


def fails_to_prepare() -> None:
    """A preparation that fails."""
    raise RuntimeError("no kernels here")


def kill(pid: int) -> None:
    """End a process as the kernel would if memory ran out."""
    os.kill(pid, signal.SIGKILL)

"""Many ranks, many operations."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from sim import RankContext, World
from tests.sim.programs import rank_threads


def test_64_ranks_do_100_all_reduces() -> None:
    def program(ctx: RankContext) -> float:
        x = torch.tensor([float(ctx.rank)])
        for _ in range(100):
            dist.all_reduce(x)
            x /= ctx.world_size
        return float(x)

    start = time.perf_counter()
    with World("tp8pp8") as world:
        assert world.run(program) == [31.5] * 64
        assert world.ledger.totals() == {("default_pg", "all_reduce"): (100, 100 * 2 * 63 * 4)}
    assert time.perf_counter() - start < 30  # a few seconds even on a busy machine
    assert rank_threads() == []


def test_128_ranks_pass_a_message_around() -> None:
    def program(ctx: RankContext) -> float:
        x = torch.zeros(1)
        if ctx.rank:
            dist.recv(x, ctx.rank - 1)
        x += 1
        dist.send(x, (ctx.rank + 1) % ctx.world_size)
        if ctx.rank == 0:
            dist.recv(x, ctx.world_size - 1)
        return float(x)

    with World("dep128") as world:
        assert world.run(program)[0] == 128.0

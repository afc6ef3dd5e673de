"""Late delivery: when a rank sees an operation complete, and what is left of it afterwards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import BufferReuse, Deadlock, RankContext, World
from tests.sim.late import LATE, SCHEDULES, assert_reuse, assert_right
from tests.sim.programs import broken_run, ones, total_of_ranks


def test_an_operation_is_late_but_not_for_ever() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        assert work.is_success()
        y = ones()
        future = dist.all_reduce(y, async_op=True).get_future()
        following = future.then(lambda done: done.value()[0].sum())
        while not torch.futures.collect_all([future, following]).done():
            pass
        return [*x.tolist(), float(following.value())]

    assert assert_right(program) == [[2.0, 2.0, 4.0]] * 2


def test_handles_that_nobody_waits_for_land_when_the_rank_ends() -> None:
    kept: dict[int, list[torch.Tensor]] = {}

    def program(ctx: RankContext) -> None:
        x, y = ones(), torch.zeros(2)
        kept[ctx.rank] = [x, y]
        dist.all_reduce(x, async_op=True)
        if ctx.rank == 0:
            dist.isend(ones(), 1)
        else:
            dist.irecv(y, 0)

    with World("tp2") as world:
        for schedule in SCHEDULES:
            world.run(program, schedule=schedule)
            assert [t.tolist() for t in kept[0]] == [[2.0, 2.0], [0.0, 0.0]]
            assert [t.tolist() for t in kept[1]] == [[2.0, 2.0], [1.0, 1.0]]


def test_reuse_is_found_at_the_wait_also_of_an_operation_that_never_completes() -> None:
    def program(ctx: RankContext, change: bool = True) -> None:
        x = ones()
        if ctx.rank == 0:
            work = dist.all_reduce(x, async_op=True)
            if change:
                x.zero_()
            assert work is not None
            work.wait()

    broken_run(BufferReuse, program, schedule=LATE)
    broken_run(Deadlock, lambda ctx: program(ctx, change=False), schedule=LATE)


def test_memory_that_is_given_away_in_flight_is_reuse() -> None:
    def program(ctx: RankContext) -> None:
        x = ones(8)
        if ctx.rank == 0:
            dist.isend(x, 1)  # the send
            x.untyped_storage().resize_(0)
        else:
            dist.recv(x, 0)

    assert "its memory was freed" in assert_reuse(program, 0, "# the send").headline


def test_a_world_that_was_late_is_plain_again() -> None:
    def early(ctx: RankContext) -> list[float]:
        x = ones()
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        return x.tolist()

    with World("tp2") as world:
        assert world.run(early) == [[2.0, 2.0]] * 2
        assert world.run(early, schedule=LATE) == [[1.0, 1.0]] * 2
        assert world.run(early) == [[2.0, 2.0]] * 2
        assert world.run(total_of_ranks) == [1.0, 1.0]

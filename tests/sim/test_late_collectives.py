"""Under late delivery, collectives whose buffers are touched too early are found.

Each program has a near twin that keeps to the rules, and passes with the results of plain delivery.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from sim import BufferReuse, RankContext, World
from tests.sim.late import SCHEDULES, assert_reuse, assert_right
from tests.sim.programs import broken_run, ones, place


def test_writing_to_the_input_of_a_collective_in_flight_is_reuse() -> None:
    def program(ctx: RankContext, early: bool = True) -> list[float]:
        x = torch.full((3,), 1.0 + ctx.rank)
        work = dist.all_reduce(x, async_op=True)  # the sum
        assert work is not None
        if early and ctx.rank == 1:
            x.mul_(2)
        work.wait()
        return x.mul_(2).tolist()

    error = assert_reuse(program, 1, "# the sum")
    assert "changed a buffer of all_reduce(sum) float32[3]" in error.headline
    assert assert_right(lambda ctx: program(ctx, early=False)) == [[6.0] * 3] * 2


def test_a_change_that_was_undone_before_the_wait_is_reuse_if_the_data_were_read_between() -> None:
    def program(ctx: RankContext) -> None:
        x, news, out = ones(), ones(), torch.empty(4)
        if ctx.rank == 0:
            work = dist.all_gather_into_tensor(out, x, async_op=True)  # the gather
            x.zero_()
            dist.send(news, 1)
            dist.recv(news, 1)
            x.fill_(1.0)
            assert work is not None
            work.wait()
        else:
            dist.recv(news, 0)
            dist.all_gather_into_tensor(out, x)
            dist.send(news, 0)

    assert_reuse(program, 0, "# the gather")


def test_an_output_shows_poison_until_its_handle_is_waited_for() -> None:
    def program(ctx: RankContext, wait: bool = False) -> list[float]:
        x, out = torch.full((1,), float(ctx.rank)), torch.zeros(2)
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        dist.barrier()
        assert work is not None
        if wait:
            work.wait()
        seen = out.tolist()
        work.wait()
        assert out.tolist() == [0.0, 1.0]
        return seen

    with World("tp2") as world:
        assert world.run(program) == [[0.0, 1.0]] * 2
        for schedule in SCHEDULES:
            seen = world.run(program, schedule=schedule)
            assert all(value != value for of_rank in seen for value in of_rank)
    assert assert_right(lambda ctx: program(ctx, wait=True)) == [[0.0, 1.0]] * 2


def test_a_buffer_in_flight_cannot_be_passed_on() -> None:
    def program(ctx: RankContext, wait: bool = False) -> list[float]:
        x = ones()
        first = dist.all_reduce(x, async_op=True)  # the first
        assert first is not None
        if wait:
            first.wait()
        dist.all_reduce(x)  # the second
        first.wait()
        return x.tolist()

    for schedule in SCHEDULES:
        error = broken_run(BufferReuse, program, schedule=schedule)
        assert place(program, "# the first") in error.headline
        assert place(program, "# the second") in error.headline
    assert assert_right(lambda ctx: program(ctx, wait=True)) == [[4.0, 4.0]] * 2


def test_an_input_may_be_a_part_of_the_output_and_columns_may_interleave() -> None:
    def program(ctx: RankContext) -> list[Any]:
        out = torch.zeros(2, 2)
        out[ctx.rank] = 1.0 + ctx.rank
        gather = dist.all_gather_into_tensor(out, out[ctx.rank], async_op=True)
        table = torch.full((3, 2), float(ctx.rank))
        left, right = table[:, 0], table[:, 1]
        sums = [dist.all_reduce(half, async_op=True) for half in (left, right)]
        for work in (gather, *sums):
            assert work is not None
            work.wait()
        return [out.tolist(), table.tolist()]

    assert assert_right(program) == [[[[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0]] * 3]] * 2


def test_empty_scalar_narrow_and_inference_tensors_are_carried() -> None:
    def program(ctx: RankContext) -> list[Any]:
        results = []
        with torch.inference_mode():
            inference = torch.ones(2)
        values = [
            torch.empty(0, 3),
            torch.tensor(1.5),
            torch.ones(3).to(torch.float8_e5m2),
            torch.ones(2, dtype=torch.complex64),
            torch.tensor([True, False]),
            inference,
        ]
        for x in values:
            works = [dist.all_reduce(x, async_op=True)]
            parts = [torch.empty_like(x) for _ in range(2)]
            for work in works:
                assert work is not None
                work.wait()
            gathered = dist.all_gather(parts, x, async_op=True)
            assert gathered is not None
            gathered.wait()
            results.append([part.to(torch.complex64).tolist() for part in (x, *parts)])
        return results

    assert_right(program)


def test_every_collective_gives_what_it_gives_under_plain_delivery() -> None:
    def program(ctx: RankContext) -> list[Any]:
        def x(size: int = 4) -> torch.Tensor:
            return torch.arange(size, dtype=torch.float32) + 10 * ctx.rank

        seen: list[torch.Tensor] = []

        def done(work: dist.Work | None, *outputs: torch.Tensor) -> None:
            assert work is not None
            work.wait()
            seen.extend(outputs)

        a, b, c, d = x(), x(), x(), x()
        parts, halves = [x(), x()], [x(2), x(2)]
        done(dist.broadcast(a, 1, async_op=True), a)
        done(dist.reduce(b, 1, async_op=True), b)
        done(dist.reduce_scatter_tensor(c[:2].clone(), c, async_op=True), c)
        done(dist.reduce_scatter(halves[0], [x(2), x(2)], async_op=True), halves[0])
        done(dist.all_to_all_single(d, x(), async_op=True), d)
        done(dist.all_to_all(parts, [x(), x()], async_op=True), *parts)
        done(dist.scatter(a, [x(), x()] if ctx.rank == 0 else None, 0, async_op=True), a)
        done(dist.gather(b, [x(), parts[0]] if ctx.rank == 0 else None, 0, async_op=True), b)
        done(dist.barrier(async_op=True))
        return [t.tolist() for t in seen]

    assert_right(program)


def test_the_root_of_a_broadcast_is_only_read() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = torch.ones(1).expand(3) if ctx.rank == 0 else torch.zeros(3)
        work = dist.broadcast(x, 0, async_op=True)
        assert work is not None
        work.wait()
        return x.tolist()

    assert assert_right(program) == [[1.0] * 3] * 2


def test_functional_and_coalesced_collectives_land_when_waited_for() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = funcol.all_reduce(ones(), "sum", dist.group.WORLD)
        y, z = ones(), ones(3)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(y)
            dist.all_reduce(z)
        manager.wait()
        return [*(x + 0).tolist(), *y.tolist(), *z.tolist()]

    assert assert_right(program) == [[2.0] * 7] * 2

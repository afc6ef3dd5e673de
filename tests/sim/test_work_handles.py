"""Operations in flight: handles, futures, and messages in both directions at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import Deadlock, RankContext, World
from tests.sim.programs import broken_run, ones, place


@settings(max_examples=20)
@given(
    orders=st.lists(st.permutations(range(4)), min_size=2, max_size=2),
    seed=st.none() | st.integers(0, 99),
)
def test_handles_may_be_waited_for_in_any_order(orders: list[list[int]], seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        tensors = [torch.tensor([10.0**i * (ctx.rank + 1)]) for i in range(4)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for i in orders[ctx.rank]:
            works[i].wait()
            assert float(tensors[i]) == 3 * 10.0**i
        return [float(t) for t in tensors]

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [[3.0, 30.0, 300.0, 3000.0]] * 2


def test_an_operation_is_not_complete_before_all_have_called_it() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = ones()
        if ctx.rank == 1:
            dist.recv(ones(), 0)  # the news that rank 0 has looked
        work = dist.all_reduce(x, async_op=True)
        if ctx.rank == 0:
            assert not work.is_completed()
            assert x.tolist() == [1.0, 1.0]
            dist.send(ones(), 1)
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        return x.tolist()

    with World("tp2") as world:
        assert world.run(program) == [[2.0, 2.0]] * 2


def test_waiting_again_is_harmless() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        assert work.wait()
        assert work.wait()
        work.synchronize()
        return x.tolist()

    with World("tp2") as world:
        assert world.run(program) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_future_gives_the_outputs(seed: int | None) -> None:
    def program(ctx: RankContext) -> Any:
        x = ones()
        future = dist.all_reduce(x, async_op=True).get_future()
        [out] = future.wait()
        assert future.done()
        assert out.data_ptr() == x.data_ptr()
        return out.tolist()

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [[2.0, 2.0]] * 2


def test_a_future_that_follows_another_can_be_waited_for() -> None:
    def program(ctx: RankContext) -> float:
        future = dist.all_reduce(ones(), async_op=True).get_future()
        return float(future.then(lambda done: done.value()[0].sum()).wait())

    with World("tp2") as world:
        assert world.run(program) == [4.0, 4.0]


def test_asking_whether_an_operation_is_complete_lets_others_run() -> None:
    def program(ctx: RankContext) -> bool:
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None
        polls = (work.is_completed() for _ in range(1000))  # a real program would poll for ever
        completed = any(polls)
        work.wait()
        return completed

    with World("tp2") as world:
        assert world.run(program) == [True, True]


@pytest.mark.parametrize("rendezvous", [False, True])
@settings(max_examples=10)
@given(seed=st.none() | st.integers(0, 99))
def test_messages_in_both_directions_do_not_deadlock(rendezvous: bool, seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        other = 1 - ctx.rank
        received = torch.empty(2)
        works = [
            dist.isend(torch.full((2,), float(ctx.rank)), other),
            dist.irecv(received, other),
        ]
        for work in works:
            assert work is not None
            work.wait()
        return received.tolist()

    with World("tp2", seed=seed, rendezvous_sends=rendezvous) as world:
        assert world.run(program) == [[1.0, 1.0], [0.0, 0.0]]


def test_a_batch_of_messages_does_not_deadlock() -> None:
    def program(ctx: RankContext) -> list[float]:
        other, received = 1 - ctx.rank, torch.empty(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), float(ctx.rank)), other),
            dist.P2POp(dist.irecv, received, other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.tolist()

    with World("tp2", rendezvous_sends=True) as world:
        assert world.run(program) == [[1.0, 1.0], [0.0, 0.0]]


def test_the_buffer_of_a_send_is_free_again_once_it_is_posted() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = ones()
        if ctx.rank == 0:
            work = dist.isend(x, 1)
            assert work is not None
            x.zero_()
            work.wait()
        else:
            dist.recv(x.zero_(), 0)
        return x.tolist()

    with World("tp2") as world:
        assert world.run(program) == [[0.0, 0.0], [1.0, 1.0]]


def test_messages_of_a_channel_keep_their_order_and_tags_their_own() -> None:
    def program(ctx: RankContext) -> list[float]:
        values = [torch.tensor([float(i)]) for i in range(4)]
        if ctx.rank == 0:
            for i, value in enumerate(values):
                dist.send(value, 1, tag=i % 2)
            return []
        got = [torch.empty(1) for _ in range(4)]
        for slot, tag in zip(got, (1, 0, 1, 0), strict=True):
            dist.recv(slot, 0, tag=tag)
        return [float(x) for x in got]

    with World("tp2") as world:
        assert world.run(program)[1] == [1.0, 0.0, 3.0, 2.0]


def test_head_to_head_sends_deadlock_only_when_sends_wait() -> None:
    def program(ctx: RankContext) -> float:
        x, y = ones(), torch.zeros(2)
        dist.send(x, 1 - ctx.rank)  # head to head
        dist.recv(y, 1 - ctx.rank)
        return float(y.sum())

    with World("tp2") as world:
        assert world.run(program) == [2.0, 2.0]
    error = broken_run(Deadlock, program, rendezvous_sends=True)
    for report in error.ranks:
        assert report.operation.startswith("send")
        assert report.site.endswith(place(program, "# head to head"))


def test_handles_that_nobody_waits_for_are_complete_at_the_end() -> None:
    tensors = {}

    def program(ctx: RankContext) -> None:
        tensors[ctx.rank] = ones()
        dist.all_reduce(tensors[ctx.rank], async_op=True)

    with World("tp2") as world:
        world.run(program)
        world.run(program)
    assert [t.tolist() for t in tensors.values()] == [[2.0, 2.0]] * 2


def test_a_receive_from_any_rank_says_who_sent() -> None:
    def program(ctx: RankContext) -> tuple[int, float] | None:
        if ctx.rank == 2:
            dist.send(torch.tensor([7.0]), 0)
        if ctx.rank == 0:
            x = torch.empty(1)
            return dist.recv(x), float(x)
        return None

    with World("tp3") as world:
        assert world.run(program)[0] == (2, 7.0)

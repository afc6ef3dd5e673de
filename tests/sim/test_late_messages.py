"""Under late delivery, messages that are right only because the transport is quick fail.

Each program has a near twin that keeps to the rules, and passes with the results of plain delivery.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from sim import RankContext, World
from tests.sim.late import SCHEDULES, assert_reuse, assert_right
from tests.sim.programs import Program, ones


def exchange(use: Callable[[torch.Tensor, dist.Work], torch.Tensor]) -> Program:
    """A program in which rank 0 sends [1, 1], and `use` gets its buffer and handle."""

    def program(ctx: RankContext) -> list[float]:
        x = ones()
        if ctx.rank == 0:
            work = dist.isend(x, 1)
            assert work is not None
            return use(x, work).tolist()
        dist.recv(x.zero_(), 0)
        return x.tolist()

    return program


@pytest.mark.parametrize("rendezvous", [False, True])
def test_writing_to_the_buffer_of_a_send_in_flight_is_reuse(rendezvous: bool) -> None:
    def program(ctx: RankContext) -> None:
        x = ones(4)
        if ctx.rank == 0:
            work = dist.isend(x, 1)  # the send
            x[2] = 5.0
            assert work is not None
            work.wait()
        else:
            dist.recv(x, 0)

    error = assert_reuse(program, 0, "# the send", rendezvous_sends=rendezvous)
    assert "changed a buffer of send(to rank 1) float32[4] on default_pg[0, 1]" in error.headline
    assert "1 of 4 elements changed, the first at [2]" in error.headline
    assert "wait for its handle first" in error.headline
    assert error.kind == "buffer_reuse"
    assert error.ranks[0].state == "changed a buffer of"


def test_a_send_that_nobody_waits_for_is_in_flight_until_the_rank_ends() -> None:
    def program(ctx: RankContext) -> None:
        x = ones()
        if ctx.rank == 0:
            dist.isend(x, 1)  # the send
            x.zero_()
        else:
            dist.recv(x, 0)

    assert_reuse(program, 0, "# the send")


def test_waiting_asking_or_sending_a_copy_frees_the_buffer() -> None:
    def wait_first(x: torch.Tensor, work: dist.Work) -> torch.Tensor:
        work.wait()
        return x.zero_()

    def ask_first(x: torch.Tensor, work: dist.Work) -> torch.Tensor:
        while not work.is_completed():
            pass
        return x.zero_()

    def write_elsewhere(x: torch.Tensor, work: dist.Work) -> torch.Tensor:
        return x.clone().zero_()

    for use in (wait_first, ask_first, write_elsewhere):
        assert assert_right(exchange(use)) == [[0.0, 0.0], [1.0, 1.0]]


def test_writing_the_same_bits_is_no_reuse_and_a_zero_of_the_other_sign_is() -> None:
    def same(x: torch.Tensor, work: dist.Work) -> torch.Tensor:
        return x.fill_(1.0)

    assert_right(exchange(same))

    def program(ctx: RankContext) -> None:
        x = torch.tensor([0.0, float("nan")])
        if ctx.rank == 0:
            dist.isend(x, 1)  # the send
            x.neg_()
        else:
            dist.recv(x, 0)

    assert_reuse(program, 0, "# the send")


def test_a_blocking_send_frees_its_buffer() -> None:
    def program(ctx: RankContext) -> list[float]:
        x = ones()
        if ctx.rank == 0:
            dist.send(x, 1)
            x.zero_()
        else:
            dist.recv(x.zero_(), 0)
        return x.tolist()

    assert assert_right(program) == [[0.0, 0.0], [1.0, 1.0]]


def test_what_the_receiver_has_is_no_longer_in_flight() -> None:
    def program(ctx: RankContext) -> list[float]:
        x, news = ones(), torch.zeros(1)
        if ctx.rank == 0:
            dist.isend(x, 1)
            dist.recv(news, 1)  # says that x has arrived
            x.zero_()
        else:
            dist.recv(x.zero_(), 0)
            dist.send(news, 0)
        return x.tolist()

    assert assert_right(program) == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float8_e4m3fn, None),
        (torch.int64, 2**63 - 3),
        (torch.int8, 125),
        (torch.uint8, 0),
        (torch.bool, 0),
    ],
)
def test_a_receive_shows_poison_until_it_is_waited_for(
    dtype: torch.dtype, expected: int | None
) -> None:
    def program(ctx: RankContext) -> tuple[list[float], list[float]]:
        x = torch.ones(2).to(dtype) if ctx.rank == 0 else torch.zeros(2).to(dtype)
        if ctx.rank == 0:
            dist.send(x, 1)
        dist.barrier()
        before = x
        if ctx.rank == 1:
            work = dist.irecv(x, 0)
            before = x.clone()
            assert work is not None
            work.wait()
        as_read = before.tolist() if not dtype.is_floating_point else before.float().tolist()
        return as_read, x.float().tolist()

    with World("tp2") as world:
        for schedule in SCHEDULES:
            early, received = world.run(program, schedule=schedule)[1]
            assert received == [1.0, 1.0]
            if expected is None:
                assert all(value != value for value in early)
            else:
                assert early == [expected] * 2
        assert world.run(program)[1] == ([1, 1], [1.0, 1.0])


def test_writing_to_the_buffer_of_a_receive_in_flight_is_reuse() -> None:
    def program(ctx: RankContext, early: bool = True) -> list[float]:
        x = torch.ones(2)
        if ctx.rank == 0:
            dist.send(x, 1)
            return x.tolist()
        work = dist.irecv(x, 0)  # the receive
        assert work is not None
        if early:
            x.add_(1)
        work.wait()
        return x.add_(1).tolist()

    assert_reuse(program, 1, "# the receive")
    assert assert_right(lambda ctx: program(ctx, early=False)) == [[1.0, 1.0], [2.0, 2.0]]


def test_two_receives_into_one_buffer_are_reuse_and_two_sends_of_it_are_not() -> None:
    def program(ctx: RankContext) -> None:
        x, y = ones(), ones()
        if ctx.rank == 0:
            for work in [dist.isend(x, 1), dist.isend(x, 1)]:
                assert work is not None
                work.wait()
        else:
            first = dist.irecv(y, 0)  # the first
            second = dist.irecv(y, 0)
            assert first is not None and second is not None
            first.wait()
            second.wait()

    error = assert_reuse(program, 1, "# the first")
    assert "passed to recv(from rank 0) float32[2]" in error.headline


def test_a_buffer_made_in_inference_mode_is_received_into() -> None:
    def program(ctx: RankContext) -> list[float]:
        with torch.inference_mode():
            x = torch.full((2,), float(ctx.rank))
        if ctx.rank == 0:
            dist.recv(x, 1)
        else:
            dist.send(x, 0)
        return x.tolist()

    assert assert_right(program) == [[1.0, 1.0]] * 2


def test_a_batch_of_messages_is_right() -> None:
    def program(ctx: RankContext) -> list[float]:
        other, received = 1 - ctx.rank, torch.empty(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), float(ctx.rank)), other),
            dist.P2POp(dist.irecv, received, other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.tolist()

    assert assert_right(program, rendezvous_sends=True) == [[1.0, 1.0], [0.0, 0.0]]

"""What happens when the code of a rank raises, and when the runtime is misused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sim import Misuse, NotAMember, RankContext, RankFailed, World
from tests.sim.programs import broken_run, ones, place, total_of_ranks


class Oops(Exception):
    """An error of the code under test."""


def deep(rank: int) -> None:
    if rank == 1:
        raise Oops("first line\nsecond line")  # raised here


def raising(ctx: RankContext) -> None:
    deep(ctx.rank)
    dist.barrier()  # the others


def test_a_rank_that_raises_is_named_with_what_the_others_wait_in() -> None:
    error = broken_run(RankFailed, raising, "tp4")
    assert "rank 1 raised Oops: first line" in error.headline
    assert place(deep, "# raised here") in error.headline
    assert error.ranks[1].state == "raised"
    assert place(deep, "# raised here") in error.ranks[1].detail
    for rank in (0, 2, 3):
        assert "barrier" in error.ranks[rank].operation
        assert error.ranks[rank].site.endswith(place(raising, "# the others"))


def test_the_cause_is_the_ranks_own_exception_with_its_own_traceback() -> None:
    error = broken_run(RankFailed, raising)
    cause = error.__cause__
    assert isinstance(cause, Oops)
    frames = traceback.extract_tb(cause.__traceback__)
    assert [frame.name for frame in frames] == ["raising", "deep"]
    assert {frame.filename for frame in frames} == {__file__}
    assert f":{frames[-1].lineno}" in place(deep, "# raised here")


def test_arguments_to_run_leave_no_frame_of_the_runtime() -> None:
    def program(ctx: RankContext, scale: int, *, offset: int) -> int:
        if ctx.rank == scale:
            raise Oops
        return offset

    with World("tp2") as world:
        assert world.run(program, 7, offset=3) == [3, 3]
        with pytest.raises(RankFailed) as caught:
            world.run(program, 1, offset=3)
    cause = caught.value.__cause__
    assert cause is not None
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["program"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_a_rank_raises_is_a_failed_rank(error: type[BaseException]) -> None:
    def program(ctx: RankContext) -> None:
        if ctx.rank == 0:
            raise error
        dist.barrier()

    assert type(broken_run(RankFailed, program).__cause__) is error


def test_errors_that_torch_raises_point_at_the_callers_line() -> None:
    def program(ctx: RankContext) -> None:
        dist.send(ones(), ctx.rank)  # to itself

    error = broken_run(RankFailed, program)
    assert place(program, "# to itself") in error.headline


def test_ranks_unwind_through_their_finally_blocks() -> None:
    unwound = []

    def program(ctx: RankContext) -> None:
        try:
            deep(ctx.rank)
            dist.barrier()
        finally:
            unwound.append(ctx.rank)
            dist.barrier()

    broken_run(RankFailed, program, "tp4")
    assert sorted(unwound) == [0, 1, 2, 3]


def test_code_that_catches_exceptions_does_not_swallow_the_end_of_the_run() -> None:
    reached = []

    def program(ctx: RankContext) -> None:
        if ctx.rank == 1:
            raise Oops
        with contextlib.suppress(Exception):
            dist.barrier()
        reached.append(ctx.rank)

    broken_run(RankFailed, program)
    assert reached == []


def test_an_error_that_a_rank_handles_is_none() -> None:
    def program(ctx: RankContext) -> float:
        with contextlib.suppress(Oops):
            deep(ctx.rank)
        return total_of_ranks(ctx)

    with World("tp2") as world:
        assert world.run(program) == [1.0, 1.0]


# --- groups that a rank is not in ---


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda group: dist.all_reduce(ones(), group=group)),
        ("barrier", lambda group: dist.barrier(group=group)),
        ("broadcast", lambda group: dist.broadcast(ones(), 0, group=group)),
        ("all_gather", lambda group: dist.all_gather([ones()], ones(), group=group)),
        ("isend", lambda group: dist.isend(ones(), 0, group=group)),
        ("irecv", lambda group: dist.irecv(ones(), group=group)),
    ],
)
def test_a_rank_that_is_not_in_a_group_cannot_use_it(name: str, call: Callable[[Any], Any]) -> None:
    def program(ctx: RankContext) -> None:
        alone = dist.new_group([0])
        if ctx.rank == 1:
            call(alone)

    error = broken_run(NotAMember, program)
    assert f"rank 1 called {name}" in error.headline
    assert "test_rank_failures.py" in error.headline


def test_the_line_of_a_call_by_a_non_member_is_named() -> None:
    def program(ctx: RankContext) -> None:
        alone = dist.new_group([0])
        dist.all_reduce(ones(), group=alone)  # also rank 1

    assert place(program, "# also rank 1") in broken_run(NotAMember, program).headline


def test_members_alone_can_use_a_group() -> None:
    def program(ctx: RankContext) -> None:
        alone = dist.new_group([0])
        if ctx.rank == 0:
            dist.all_reduce(ones(), group=alone)

    with World("tp2") as world:
        world.run(program)


@pytest.mark.parametrize("name", ["all_reduce", "barrier"])
def test_a_group_handle_of_another_rank_cannot_be_used(name: str) -> None:
    handles = {}
    calls = {
        "all_reduce": lambda group: dist.all_reduce(ones(), group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }

    def program(ctx: RankContext) -> None:
        handles[ctx.rank] = dist.new_group([0, 1])
        dist.barrier()
        if ctx.rank == 1:
            calls[name](handles[0])

    error = broken_run(NotAMember, program)
    assert "rank 1 called" in error.headline
    assert "rank 0's" in error.headline


def test_torch_itself_refuses_the_handle_where_it_looks_up_the_root() -> None:
    handles = {}

    def program(ctx: RankContext) -> None:
        handles[ctx.rank] = dist.new_group([0, 1])
        dist.barrier()
        dist.broadcast(ones(), 0, group=handles[0])  # also rank 1

    error = broken_run(RankFailed, program)
    assert "rank 1 raised ValueError" in error.headline
    assert place(program, "# also rank 1") in error.headline


def test_a_ranks_own_handle_of_the_group_can_be_used() -> None:
    handles = {}

    def program(ctx: RankContext) -> None:
        handles[ctx.rank] = dist.new_group([0, 1])
        dist.barrier()
        dist.all_reduce(ones(), group=handles[ctx.rank])

    with World("tp2") as world:
        world.run(program)


# --- misuse ---


def in_thread(call: Callable[[], Any]) -> None:
    """Call it on another thread, and lose its errors, as threads do."""

    def quiet() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=quiet)
    thread.start()
    thread.join()


def in_pool(call: Callable[[], Any]) -> None:
    """Call it on another thread, and raise its errors here."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("start", [in_thread, in_pool])
@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_reduce(ones()),
        lambda: dist.all_reduce(ones(), async_op=True),
        lambda: dist.isend(ones(), 1 - dist.get_rank()),
    ],
    ids=["all_reduce", "async all_reduce", "isend"],
)
def test_a_thread_that_is_no_rank_cannot_communicate(
    start: Callable[[Callable[[], Any]], None], call: Callable[[], Any]
) -> None:
    error = broken_run(Misuse, lambda ctx: start(call))
    assert "thread" in error.headline


def test_a_thread_that_is_no_rank_may_do_anything_else() -> None:
    def program(ctx: RankContext) -> float:
        results = []
        in_thread(lambda: results.append(ones(3).sum()))
        return float(results[0])

    with World("tp2") as world:
        assert world.run(program) == [3.0, 3.0]


def test_a_world_cannot_be_run_from_inside_its_ranks() -> None:
    worlds: list[World] = []

    def program(ctx: RankContext) -> None:
        worlds[0].run(total_of_ranks)  # inside

    with World("tp2") as world:
        worlds.append(world)
        with pytest.raises(Misuse, match="inside") as caught:
            world.run(program)
    assert place(program, "# inside") in str(caught.value)


def test_a_world_cannot_be_closed_from_inside_its_ranks() -> None:
    worlds: list[World] = []

    def program(ctx: RankContext) -> None:
        worlds[0].close()

    with World("tp2") as world:
        worlds.append(world)
        with pytest.raises(Misuse, match="inside"):
            world.run(program)


def test_a_rank_may_run_a_world_of_its_own() -> None:
    def program(ctx: RankContext) -> tuple[list[float], float]:
        with World("tp3") as inner:
            return inner.run(total_of_ranks), total_of_ranks(ctx)

    with World("tp2") as world:
        assert world.run(program) == [([3.0, 3.0, 3.0], 1.0)] * 2

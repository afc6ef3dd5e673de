"""Worlds come and go: they leave no thread, no group, no patch and no memory behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from sim import RankContext, RankFailed, RankLocal, World
from tests.sim.programs import busy, rank_threads, run_python, total_of_ranks

SHAPES = ["tp2", "tp4", "tp2pp2", "tep2dp2", "tp1", "dep3"]
OBJECTS_FOR_100_WORLDS = 200
"""Python objects; one left behind by each rank would be more than 300."""
BYTES_FOR_100_WORLDS = 128 * 1024
"""A first hundred worlds were seen to fill caches with 50 KiB, and a fifth with 1 KiB."""


def torch_names() -> dict[str, Any]:
    """Every name of the module that worlds patch."""
    return {name: value for name, value in vars(c10d).items() if not name.startswith("__")}


@pytest.fixture
def untouched() -> Iterator[None]:
    """What a test does leaves the process as it was."""
    names, hook, threads = torch_names(), sys.excepthook, threading.active_count()
    yield
    assert torch_names() == names
    assert sys.excepthook is hook
    assert threading.active_count() == threads
    assert not dist.is_initialized()


@pytest.fixture
def unlogged() -> Iterator[None]:
    """No log records, which pytest would keep until the test ends."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("untouched")
class TestTheProcessIsAsBefore:
    def test_after_a_world(self) -> None:
        with World("tp4") as world:
            world.run(busy)

    def test_after_a_world_that_never_ran(self) -> None:
        World("tp2").close()

    def test_after_a_run_that_broke(self) -> None:
        with World("tp2") as world, pytest.raises(RankFailed):
            world.run(lambda ctx: 1 // ctx.rank)

    def test_after_an_error_between_runs(self) -> None:
        with pytest.raises(KeyError), World("tp2") as world:
            world.run(busy)
            raise KeyError

    def test_after_a_world_that_could_not_start(self) -> None:
        def fresh() -> Any:
            raise KeyError("no fresh value")

        with pytest.raises(KeyError):
            World("tp2", rank_local=[RankLocal(__name__, ("SHAPES",), "a test", fresh=fresh)])

    def test_after_two_worlds_that_overlapped(self) -> None:
        first, second = World("tp2"), World("tp4")
        first.close()
        assert second.run(total_of_ranks) == [6.0] * 4
        second.close()


def test_a_world_runs_again_and_again_and_keeps_its_groups() -> None:
    groups: dict[int, Any] = {}

    def build(ctx: RankContext) -> None:
        groups[ctx.rank] = dist.new_group([0, 1])

    def use(ctx: RankContext, step: int) -> float:
        x = torch.tensor([float(step)])
        dist.all_reduce(x, group=groups[ctx.rank])
        return float(x)

    with World("tp2") as world:
        world.run(build)
        for step in range(20):
            assert world.run(use, step) == [2.0 * step] * 2


def test_two_worlds_live_at_the_same_time() -> None:
    def where(ctx: RankContext, offset: int) -> tuple[int, float]:
        x = torch.tensor([float(offset)])
        dist.all_reduce(x)
        return dist.get_world_size(), float(x)

    with World("tp2") as two, World("tp3") as three:
        for i in range(5):
            assert two.run(where, i) == [(2, 2.0 * i)] * 2
            assert three.run(where, i) == [(3, 3.0 * i)] * 3
        assert len(two.ledger) == len(three.ledger) == 5


def test_ranks_of_a_world_live_in_its_threads_only_until_it_is_closed() -> None:
    with World("tp4"):
        assert len(rank_threads()) == 4
    assert rank_threads() == []


def test_a_failed_world_does_not_disturb_another() -> None:
    with World("tp2") as good:
        with World("tp2") as bad, pytest.raises(RankFailed):
            bad.run(lambda ctx: 1 // ctx.rank)
        assert good.run(total_of_ranks) == [1.0, 1.0]


def one_world(topology: str, *, fails: bool) -> None:
    """A world from start to end."""

    def program(ctx: RankContext) -> None:
        busy(ctx) if ctx.world_size > 1 else total_of_ranks(ctx)
        if fails and ctx.rank == 0:
            raise ValueError
        if fails:
            dist.barrier()

    with contextlib.suppress(RankFailed), World(topology) as world:
        world.run(program)


def test_a_hundred_worlds_leave_nothing_behind(unlogged: None) -> None:
    def worlds(count: int) -> tuple[int, int]:
        """Run so many worlds; return how many objects and bytes there are afterwards."""
        for i in range(count):
            one_world(SHAPES[i % len(SHAPES)], fails=i % 3 == 0)
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    def groups() -> int:
        gc.collect()
        return sum(isinstance(o, dist.ProcessGroup) for o in gc.get_objects())

    groups_before = groups()
    worlds(len(SHAPES))  # caches fill
    threads = threading.active_count()
    tracemalloc.start()
    try:
        objects, size = worlds(20)
        objects_later, size_later = worlds(100)
    finally:
        tracemalloc.stop()
    assert objects_later - objects < OBJECTS_FOR_100_WORLDS
    assert size_later - size < BYTES_FOR_100_WORLDS
    assert threading.active_count() == threads
    assert groups() == groups_before


def test_groups_that_a_program_destroys_are_let_go() -> None:
    def churn(ctx: RankContext, times: int) -> None:
        for _ in range(times):
            group = dist.new_group([0, 1])
            dist.barrier(group=group)
            dist.destroy_process_group(group)

    with World("tp2") as world:
        world.run(churn, 5)
        world.ledger.clear()
        gc.collect()
        before = len(gc.get_objects())
        world.run(churn, 50)
        world.ledger.clear()
        gc.collect()
        # torch itself keeps an empty list of groups for each tag, on each of two ranks.
        assert len(gc.get_objects()) - before < 2 * 50 + 50


AFTERWARDS = """
import sys, threading
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
originals = dict(vars(c10d))
from sim import World, label_group
from tests.sim.programs import busy

with World("tp4") as world:
    world.run(busy)
for name in ("_new_process_group_helper", "_warn_not_in_group", "_world"):
    assert getattr(c10d, name) is originals[name], name
assert "vllm" not in sys.modules

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert type(dist.group.WORLD) is dist.ProcessGroup
label_group(dist.group.WORLD, "not ours")
x = torch.ones(2)
dist.all_reduce(x)
sizes = []
resolve = lambda: sizes.append(c10d._resolve_process_group(dist.group.WORLD.group_name).size())
thread = threading.Thread(target=resolve)  # the registry of groups is no longer one for each thread
thread.start()
thread.join()
with World("tp2") as world:  # a world beside a real group
    world.run(busy)
dist.all_reduce(x)
dist.destroy_process_group()
print(x.tolist(), sizes)
left_open = World("tp2")  # must not keep the process from ending
left_open.run(busy)
"""


def test_real_groups_work_after_a_world_and_beside_one() -> None:
    assert run_python(AFTERWARDS) == "[1.0, 1.0] [1]\n"

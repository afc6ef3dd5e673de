"""Worlds over rank processes: interface, reuse, and what is kept."""

from __future__ import annotations

import time

import pytest
import torch

from sim import Misuse, World
from sim.gloo import GlooPool, GlooWorld, wire
from tests.sim.gloo import programs
from tests.sim.gloo.leftovers import alive, gone

pytestmark = pytest.mark.gloo


def test_results_come_by_rank_and_the_ledger_has_source_lines(pool: GlooPool) -> None:
    with GlooWorld("tp2pp2", pool=pool) as world:
        assert [x.tolist() for x in world.run(programs.summed)] == [[6.0, 6.0]] * 4
        [entry] = world.ledger.entries
    assert (entry.op, entry.ranks, entry.detail) == ("all_reduce", (0, 1, 2, 3), "sum")
    assert str(entry.sites[3]).startswith("tests/sim/gloo/programs.py:")


def test_processes_serve_worlds_of_any_size_and_each_starts_fresh(pool: GlooPool) -> None:
    with GlooWorld(4, pool=pool) as world:
        first = set(world.pids)
        assert world.run(programs.counted) == [1] * 4
        assert world.run(programs.counted) == [2] * 4
    for size in (2, 3, 4):
        with GlooWorld(size, pool=pool) as world:
            assert set(world.pids) <= first
            assert world.run(programs.counted) == [1] * size
            assert [float(x[0]) for x in world.run(programs.summed)] == [sum(range(size))] * size


def test_a_warm_world_starts_in_under_a_second(pool: GlooPool) -> None:
    pool.warm(4)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with GlooWorld("tep2pp2", pool=pool):
            seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_two_worlds_at_once_do_not_meet(pool: GlooPool) -> None:
    with GlooWorld(2, pool=pool) as one, GlooWorld(2, pool=pool) as other:
        assert not set(one.pids) & set(other.pids)
        assert one.run(programs.counted) == [1, 1]
        assert other.run(programs.summed)[0].tolist() == [1.0, 1.0]
        assert one.run(programs.counted) == [2, 2]


def test_programs_run_within_what_the_world_was_given(pool: GlooPool) -> None:
    with GlooWorld(2, pool=pool, within=programs.marked) as world:
        assert world.run(programs.environment) == ["on", "on"]
    with GlooWorld(2, pool=pool) as world:
        assert world.run(programs.environment) == [None, None]


def test_the_folded_world_keeps_in_the_same_way() -> None:
    with World(2) as world:
        assert world.run(programs.counted) == [1, 1]
        assert world.run(programs.counted) == [2, 2]
        assert world.salvage(programs.kept_count) == [2, 2]
    with World(2) as world:
        assert world.run(programs.counted) == [1, 1]


def test_a_program_that_cannot_travel_is_refused_in_one_line(pool: GlooPool) -> None:
    with GlooWorld(2, pool=pool) as world:
        with pytest.raises(Misuse, match="top-level function"):
            world.run(lambda ctx: ctx.rank)
        assert world.run(programs.counted) == [1, 1]


def test_a_pool_that_cannot_be_prepared_says_why() -> None:
    with (
        GlooPool(programs.fails_to_prepare) as pool,
        pytest.raises(Misuse, match="RuntimeError: no kernels here"),
    ):
        GlooWorld(2, pool=pool)


def test_an_idle_rank_that_was_killed_is_replaced(pool: GlooPool) -> None:
    pool.warm(2)
    victim = pool.pids()[1]
    programs.kill(victim)
    assert gone([victim])
    with GlooWorld(2, pool=pool) as world:
        assert victim not in world.pids
        assert world.run(programs.summed)[0].tolist() == [1.0, 1.0]


def test_a_zygote_that_was_killed_is_replaced() -> None:
    with GlooPool() as pool:
        pool.warm(1)
        zygote, rank = pool.pids()
        programs.kill(zygote)
        assert gone([zygote, rank])
        with GlooWorld(2, pool=pool) as world:
            assert world.run(programs.summed)[0].tolist() == [1.0, 1.0]


def test_closing_ends_every_process() -> None:
    pool = GlooPool()
    world = GlooWorld(2, pool=pool)
    pids = [*world.pids, *pool.pids()]
    assert all(map(alive, pids))
    world.close()
    pool.close()
    assert gone(pids)
    with pytest.raises(Misuse, match="closed"):
        GlooWorld(2, pool=pool)


def test_tensors_keep_dtype_bits_and_shape() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64, torch.int16):
        for shape in ((), (0, 3), (2, 3), (1, 4)):
            x = torch.ones(shape).to(dtype).mT if len(shape) == 2 else torch.ones(shape).to(dtype)
            [y] = wire.load(wire.dump({"x": [x]}))["x"]
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            assert torch.equal(y.to(torch.complex64), x.to(torch.complex64))

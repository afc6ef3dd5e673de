"""What is said when a run over processes breaks; and what is said of its right twin: nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sim import (
    Deadlock,
    Mismatch,
    NotAMember,
    RankDied,
    RankFailed,
    RankHung,
    SimError,
    Undelivered,
    World,
)
from sim.gloo import GlooPool, GlooWorld
from tests.sim.gloo import programs
from tests.sim.gloo.leftovers import gone, listening_ports, shared_memory

pytestmark = pytest.mark.gloo

KILLS = 50


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        (programs.raises_on_one, RankFailed, "rank 1 raised ValueError: one is enough at .*:"),
        (programs.exits_on_one, RankDied, "rank 1 ended with exit code 7"),
        (programs.killed_on_one, RankDied, "rank 1 was ended by SIGKILL"),
        (programs.skips_on_one, Deadlock, "ranks 0, 2 wait for calls .*; rank 1 finished"),
        (programs.crossed_receives, Deadlock, "ranks 0, 1 wait"),
        (programs.longer_on_one, Mismatch, r"shapes differ: .*\[4\].*\[5\]"),
        (programs.another_operation_on_one, Mismatch, "operations differ"),
        (programs.longer_message, Mismatch, r"rank 0 sends float32\[2\], but rank 1 expects"),
        (programs.unreceived, Undelivered, "an operation never completed"),
        (programs.of_another_group, NotAMember, "rank 2 called all_reduce"),
        (programs.result_that_cannot_travel, RankFailed, "pickle"),
    ],
)
def test_each_failure_is_named(
    pool: GlooPool, program: Callable[..., Any], kind: type[SimError], says: str
) -> None:
    start = time.monotonic()
    with GlooWorld(3, pool=pool) as world:
        pids = world.pids
        with pytest.raises(kind, match=f"(?s){says}") as caught:
            world.run(program)
    # Nothing here takes the time limit.
    assert time.monotonic() - start < 25
    assert len(caught.value.ranks) >= 1
    assert gone(pids)


@pytest.mark.parametrize(
    "program",
    [
        programs.raises_on_one,
        programs.skips_on_one,
        programs.crossed_receives,
        programs.longer_on_one,
        programs.another_operation_on_one,
        programs.longer_message,
        programs.unreceived,
        programs.of_another_group,
    ],
)
def test_the_folded_transport_says_the_same(pool: GlooPool, program: Callable[..., Any]) -> None:
    errors = []
    with GlooWorld(3, pool=pool) as gloo, World(3, rendezvous_sends=False) as folded:
        for world in (gloo, folded):
            with pytest.raises(SimError) as caught:
                world.run(program)
            errors.append(caught.value)
    over_gloo, over_threads = errors
    assert over_gloo.kind == over_threads.kind
    if not isinstance(over_gloo, RankFailed):
        assert over_gloo.headline == over_threads.headline


def test_a_dead_rank_is_told_with_its_last_operations(pool: GlooPool) -> None:
    with GlooWorld(3, pool=pool) as world, pytest.raises(RankDied) as caught:
        world.run(programs.killed_on_one)
    dead = caught.value.ranks[1]
    assert dead.state == "died"
    assert "before: all_reduce(sum) float32[2] on default_pg[0, 1, 2]" in dead.detail
    assert "tests/sim/gloo/programs.py:" in dead.detail


def test_a_hang_takes_the_limit_and_names_the_rank(pool: GlooPool) -> None:
    start = time.monotonic()
    with GlooWorld(3, pool=pool, limit=2.0) as world:
        pids = world.pids
        with pytest.raises(RankHung, match="rank 1 showed no sign of life for 2 s") as caught:
            world.run(programs.hangs_on_one)
    assert 2.0 <= time.monotonic() - start < 8.0
    assert [rank.state for rank in caught.value.ranks] == ["waits in", "hangs", "waits in"]
    assert gone(pids)


def test_a_rank_that_takes_its_time_is_no_hang(pool: GlooPool) -> None:
    with GlooWorld(3, pool=pool, limit=4.0) as world:
        for result in world.run(programs.works_on_one, 1.5):
            assert result.tolist() == [3.0, 3.0]


def test_what_ranks_kept_can_be_had_after_a_failure(pool: GlooPool) -> None:
    with GlooWorld(3, pool=pool) as world:
        with pytest.raises(RankFailed):
            world.run(programs.counts_then_raises_on_one)
        assert world.salvage(programs.kept_count) == [1, 1, 1]
    with GlooWorld(3, pool=pool) as world:
        with pytest.raises(RankDied):
            world.run(programs.killed_on_one)
        assert world.salvage(programs.kept_count) == [0, None, 0]


def test_the_cause_is_the_ranks_own_exception(pool: GlooPool) -> None:
    with GlooWorld(3, pool=pool) as world, pytest.raises(RankFailed) as caught:
        world.run(programs.raises_on_one)
    assert isinstance(caught.value.__cause__, ValueError)


def test_fifty_random_kills_are_each_told_and_leave_nothing() -> None:
    """A random rank at a random time in a step."""
    chance = random.Random(7)
    before = shared_memory()
    seen = []
    with GlooPool() as pool:
        pool.warm(4)
        for _ in range(KILLS):
            with GlooWorld("tp2pp2", pool=pool) as world:
                seen += world.pids
                victim = chance.randrange(4)
                timer = threading.Timer(
                    chance.uniform(0.0, 0.1), programs.kill, [world.pids[victim]]
                )
                timer.start()
                with pytest.raises(RankDied, match=f"rank {victim} was ended by SIGKILL") as caught:
                    world.run(programs.many_sums, 1_000_000)
                timer.join()
                assert caught.value.ranks[victim].state.startswith("died")
                assert len(caught.value.ranks) == 4
        seen += pool.pids()
        port = pool.store()[1]
    assert gone(seen)
    assert shared_memory() <= before
    assert port not in listening_ports()

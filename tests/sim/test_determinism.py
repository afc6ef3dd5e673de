"""One seed decides everything: the same program and seed give the same run, byte for byte."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import RankContext, World
from tests.sim.programs import Program, busy, run_python

SEEDS = [None, 0, 1, 2]
schedules = st.none() | st.integers(0, 10_000)


def ledger_of(program: Program, topology: str, seed: int | None) -> str:
    """The ledger of one run in a world of its own."""
    with World(topology, seed=seed) as world:
        world.run(program)
        return world.ledger.to_json()


@settings(max_examples=15)
@given(schedules)
def test_the_same_seed_gives_the_same_ledger(seed: int | None) -> None:
    assert ledger_of(busy, "tp4", seed) == ledger_of(busy, "tp4", seed)


def test_the_same_seed_gives_the_same_ledger_in_other_processes() -> None:
    source = (
        "from tests.sim.programs import busy\n"
        "from tests.sim.test_determinism import SEEDS, ledger_of\n"
        "print('\\n--\\n'.join(ledger_of(busy, 'tp4', seed) for seed in SEEDS), end='')"
    )
    here = "\n--\n".join(ledger_of(busy, "tp4", seed) for seed in SEEDS)
    assert here == run_python(source, PYTHONHASHSEED="1")


def test_a_seed_decides_all_runs_of_a_world_in_turn() -> None:
    def three_runs(seed: int) -> str:
        with World("tp4", seed=seed) as world:
            for _ in range(3):
                world.run(busy)
            return world.ledger.to_json()

    assert three_runs(5) == three_runs(5)


@settings(max_examples=20)
@given(schedules)
def test_a_right_program_gives_the_same_results_under_every_seed(seed: int | None) -> None:
    with World("tp4", seed=seed) as world, World("tp4") as plain:
        assert world.run(busy) == plain.run(busy)


def arrivals(ctx: RankContext) -> list[int]:
    """The order in which rank 0 is reached: a race."""
    order = []
    for _ in range(ctx.world_size - 1):
        if ctx.rank == 0:
            x = torch.zeros(1)
            work = dist.irecv(x)
            assert work is not None
            work.wait()
            order.append(int(x))
    if ctx.rank != 0:
        dist.send(torch.tensor([float(ctx.rank)]), 0)
    return order


def outcomes(program: Program, seeds: range) -> set[str]:
    """The different results of rank 0 under these seeds."""
    found = set()
    for seed in seeds:
        with World("tp4", seed=seed) as world:
            found.add(str(world.run(program)[0]))
    return found


def test_a_race_shows_under_some_seeds() -> None:
    raced = outcomes(arrivals, range(12))
    assert len(raced) > 1
    assert all(sorted(order) == sorted("[1, 2, 3]") for order in raced)
    assert outcomes(arrivals, range(12)) == raced


def test_without_a_race_all_seeds_agree() -> None:
    assert len(outcomes(busy, range(12))) == 1


def test_seeds_give_different_schedules() -> None:
    assert len({ledger_of(busy, "tp4", seed) for seed in range(12)}) > 1


@pytest.mark.parametrize("seed", [None, 3])
def test_the_number_of_switches_repeats(seed: int | None) -> None:
    def switches() -> int:
        with World("tp4", seed=seed) as world:
            world.run(busy)
            return world.switches

    assert switches() == switches() > 4

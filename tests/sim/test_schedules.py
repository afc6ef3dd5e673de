"""A schedule replays, and no schedule changes what a right program computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import RankContext, Schedule, World
from tests.sim.programs import Program, total_of_ranks
from tests.sim.test_determinism import arrivals

schedules = st.builds(Schedule, seed=st.none() | st.integers(0, 10_000), late=st.booleans())


@dataclass(frozen=True)
class Step:
    """One operation of a random program."""

    op: str
    buffer: int
    """Which of the program's buffers it takes; the next one is its output, if it has one."""
    wait: bool
    """Whether it is waited for at once, rather than when its buffers are needed again."""


OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "ring", "bump"]
programs = st.lists(st.builds(Step, st.sampled_from(OPS), st.integers(0, 3), st.booleans()))


def right_program(steps: list[Step]) -> Program:
    """A program of these steps that waits before it uses a buffer again."""

    def program(ctx: RankContext) -> list[list[float]]:
        size = ctx.world_size
        buffers = [torch.arange(size) * (i + 1.0) + ctx.rank for i in range(4)]
        in_flight: list[tuple[set[int], list[Any]]] = []

        def free(*wanted: int) -> None:
            for entry in [e for e in in_flight if e[0] & set(wanted)]:
                in_flight.remove(entry)
                for work in entry[1]:
                    work.wait()

        for step in steps:
            i, j = step.buffer, (step.buffer + 1) % 4
            x, y = buffers[i], buffers[j]
            used, works = {i}, []
            if step.op in ("all_gather", "reduce_scatter", "ring"):
                used.add(j)
            free(*used)
            if step.op == "all_reduce":
                works = [dist.all_reduce(x, async_op=True)]
            elif step.op == "broadcast":
                works = [dist.broadcast(x, i % size, async_op=True)]
            elif step.op == "all_gather":
                works = [dist.all_gather_into_tensor(y, x[:1], async_op=True)]
            elif step.op == "reduce_scatter":
                works = [dist.reduce_scatter_tensor(y[1:2], x, async_op=True)]
            elif step.op == "ring":
                to, source = (ctx.rank + 1) % size, (ctx.rank - 1) % size
                works = [dist.isend(x, to), dist.irecv(y, source)]
            else:
                # Sums of sums grow fast, and must stay finite to be compared.
                x.remainder_(1000).add_(1)
            if works:
                in_flight.append((used, works))
            if step.wait:
                free(*used)
        free(0, 1, 2, 3)
        return [t.tolist() for t in buffers]

    return program


@settings(max_examples=60)
@given(steps=programs, schedule=schedules)
@pytest.mark.parametrize("topology", ["tp2", "tp3"])
def test_a_right_program_computes_the_same_under_every_schedule(
    topology: str, steps: list[Step], schedule: Schedule
) -> None:
    program = right_program(steps)
    with World(topology) as world:
        plain = world.run(program)
        assert world.run(program, schedule=schedule) == plain
        assert world.run(program) == plain


@settings(max_examples=20)
@given(steps=programs, schedule=schedules, before=schedules)
def test_a_schedule_replays_whatever_the_world_ran_before(
    steps: list[Step], schedule: Schedule, before: Schedule
) -> None:
    program = right_program(steps)

    def ledger(world: World) -> str:
        world.ledger.clear()
        world.run(program, schedule=schedule)
        return world.ledger.to_json()

    with World("tp3") as fresh, World("tp3", seed=7) as used:
        used.run(arrivals)
        used.run(total_of_ranks, schedule=before)
        assert ledger(fresh) == ledger(used) == ledger(used)


def test_a_schedule_holds_for_one_run_and_the_seed_of_the_world_goes_on() -> None:
    def orders(interlude: bool) -> list[str]:
        found = []
        with World("tp4", seed=5) as world:
            for _ in range(6):
                found.append(str(world.run(arrivals)[0]))
                if interlude:
                    world.run(total_of_ranks, schedule=Schedule(seed=3, late=True))
        return found

    assert orders(interlude=True) == orders(interlude=False)
    assert len(set(orders(interlude=False))) > 1


def test_one_world_serves_many_schedules() -> None:
    def outcomes(late: bool) -> list[str]:
        with World("tp4") as world:
            return [
                str(world.run(arrivals, schedule=Schedule(seed=seed, late=late))[0])
                for seed in range(12)
            ]

    for late in (False, True):
        assert len(set(outcomes(late))) > 1
        assert outcomes(late) == outcomes(late)


def test_a_seed_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number or None, not '3'"):
        Schedule(seed="3")  # type: ignore[arg-type]


def test_a_schedule_says_what_it_is() -> None:
    assert str(Schedule()) == "plain order"
    assert str(Schedule(seed=4, late=True)) == "seed 4, late delivery"

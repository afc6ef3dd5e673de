"""What the tests of late delivery share: the schedules, and what right and wrong programs do."""

from __future__ import annotations

from typing import Any

from sim import BufferReuse, Schedule, World
from tests.sim.programs import Program, broken_run, place

LATE = Schedule(late=True)
SCHEDULES = [LATE, *(Schedule(seed=seed, late=True) for seed in range(5))]


def assert_right(program: Program, topology: str = "tp2", **options: Any) -> list[Any]:
    """The program gives the same under plain delivery and all late schedules; return that."""
    with World(topology, **options) as world:
        plain = world.run(program)
        for schedule in SCHEDULES:
            assert world.run(program, schedule=schedule) == plain, schedule
        assert world.run(program) == plain
    return plain


def assert_reuse(program: Program, rank: int, text: str, **options: Any) -> BufferReuse:
    """Every late schedule finds that `rank` reuses the buffer of the line with `text`."""
    with World("tp2", **options) as world:
        world.run(program)
    for schedule in SCHEDULES:
        error = broken_run(BufferReuse, program, schedule=schedule, **options)
        assert error.headline.startswith(f"rank {rank} ")
        assert place(program, text) in error.headline
        report = error.ranks[rank]
        assert report.rank == rank
        assert place(program, text) in f"{report.site} {report.detail}"
    return error

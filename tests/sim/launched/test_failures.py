"""What is said when a run on launched ranks breaks, and that all of them then end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim.gloo import programs
from tests.sim.launched.jobs import Job
from tests.sim.launched.launch import launch

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.mark.parametrize(
    ("program", "kind", "says"),
    [
        (programs.counts_then_raises_on_one, "rank_failed", "rank 1 raised ValueError: one is"),
        (programs.killed_on_one, "rank_died", "a rank's process ended: rank 1 ended"),
        (programs.skips_on_one, "deadlock", "ranks 0, 2 wait for calls"),
        (programs.longer_on_one, "mismatch", "shapes differ"),
        (programs.hangs_on_one, "rank_hung", "rank 1 showed no sign of life for 3 s"),
    ],
)
def test_each_failure_is_named_and_ends_the_launch(
    tmp_path: Path, program: Callable[..., Any], kind: str, says: str
) -> None:
    job = Job(topology="tp3", runs=((program, ()),), look=programs.kept_count, limit=3.0)
    launched = launch(tmp_path, 3, job)
    assert launched.code == 1, launched.output
    [done] = launched.done
    assert (done.kind, says in done.said) == (kind, True), done.said
    # Every rank is told of, and those that live have answered beside what they are stuck in.
    assert all(f"rank {rank} " in done.said for rank in range(3)), done.said
    counted = 1 if program is programs.counts_then_raises_on_one else 0
    dead = [1] if program is programs.killed_on_one else []
    assert done.looked == [None if rank in dead else counted for rank in range(3)]
    assert "test_failures" not in done.said


def test_a_world_that_holds_is_followed_by_another(tmp_path: Path) -> None:
    """The right twin of all of the above; state of the first world is not in the second."""
    jobs = [
        Job(topology=word, runs=((programs.counted, ()), (programs.works_on_one, (1.0,))))
        for word in ("tp3", "pp3")
    ]
    launched = launch(tmp_path, 3, *jobs)
    assert launched.code == 0, launched.output
    for done in launched.done:
        counted, summed = done.results
        assert counted == [1, 1, 1]
        assert [float(x[0]) for x in summed] == [3.0, 3.0, 3.0]
        assert [entry.op for entry in done.ledgers[1]] == ["all_reduce"]

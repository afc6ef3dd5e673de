"""Programs on launched ranks give what they give folded and in numpy, with equal ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sim import Schedule, World
from sim.ledger import first_difference
from tests.sim.conformance.cases import CASES
from tests.sim.conformance.compare import as_wanted, difference, expected, roundings
from tests.sim.conformance.gloo_pool import Invocation
from tests.sim.conformance.test_conformance import batch_of
from tests.sim.gloo import programs
from tests.sim.gloo.test_conformance import SIZES_OF_THEIR_OWN
from tests.sim.launched.jobs import Job
from tests.sim.launched.launch import launch

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


DRAWS = 3
"""Draws of sizes and seeds for each case; the first is the smallest there is."""


def draws(count: int) -> list[tuple[str, tuple[Invocation, ...]]]:
    """Batches of every case. Collected first, since a launch takes seconds."""
    found: list[tuple[str, tuple[Invocation, ...]]] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None)
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        found.extend((name, tuple(batch_of(case, data))) for name, case in CASES.items())

    draw()
    return found


def test_every_case(tmp_path: Path) -> None:
    """Over gloo as it is, and by way of copies as for tensors of a shared GPU."""
    batches = draws(DRAWS)
    runs = tuple((programs.invoke, (batch,)) for _, batch in batches)
    jobs = [Job(topology="tp2", runs=runs, staged=staged) for staged in (False, True)]
    launched = launch(tmp_path, 2, *jobs)
    assert launched.code == 0, launched.output
    for job, done in zip(jobs, launched.done, strict=True):
        with World(2) as folded:
            for (name, batch), found, entries in zip(
                batches, done.results, done.ledgers, strict=True
            ):
                where = f"{name}, staged {job.staged}"
                folded.ledger.clear()
                over_threads = folded.run(programs.invoke, batch, schedule=Schedule())
                for i, invocation in enumerate(batch):
                    ours, theirs = ([of[i] for of in each] for each in (found, over_threads))
                    if CASES[name].truth is not None:
                        wanted = expected(CASES[name], invocation, 2)
                        assert difference(ours, *wanted) is None, (where, invocation)
                    if roundings(invocation, 2) == 0:
                        folded_values = as_wanted(theirs, invocation)
                        assert difference(ours, folded_values, None) is None, (where, invocation)
                if name not in SIZES_OF_THEIR_OWN:
                    assert first_difference(entries, folded.ledger.entries) is None, where

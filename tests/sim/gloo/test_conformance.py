"""Programs give the same over rank processes as folded and in numpy, with equal ledgers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sim import Schedule, World
from sim.gloo import GlooPool, GlooWorld
from sim.ledger import first_difference
from tests.sim.conformance.cases import CASES
from tests.sim.conformance.compare import as_wanted, difference, expected, roundings
from tests.sim.conformance.test_conformance import batch_of
from tests.sim.gloo import programs

pytestmark = pytest.mark.gloo

SIZES_OF_THEIR_OWN = {"objects"}
"""They pickle tensors, and torch numbers the storages in a pickle as the process goes."""


@pytest.fixture(scope="module")
def worlds(pool: GlooPool):  # type: ignore[no-untyped-def]
    """A world over gloo and a folded one."""
    with GlooWorld(2, pool=pool) as gloo, World(2) as folded:
        yield gloo, folded


@pytest.mark.parametrize("name", CASES)
@settings(
    max_examples=1,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_case(name: str, worlds, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    gloo, folded = worlds
    case = CASES[name]
    batch = tuple(batch_of(case, data))
    found = []
    for world, more in ((gloo, {}), (folded, {"schedule": Schedule()})):
        world.ledger.clear()
        found.append(world.run(programs.invoke, batch, **more))
    for i, invocation in enumerate(batch):
        over_gloo, over_threads = ([of_rank[i] for of_rank in results] for results in found)
        if case.truth is not None:
            assert difference(over_gloo, *expected(case, invocation, 2)) is None, invocation
        if roundings(invocation, 2) == 0:
            assert difference(over_gloo, as_wanted(over_threads, invocation), None) is None
    if name not in SIZES_OF_THEIR_OWN:
        assert first_difference(gloo.ledger.entries, folded.ledger.entries) is None

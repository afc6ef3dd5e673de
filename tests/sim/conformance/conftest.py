"""Fixtures: gloo processes that live for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sim.conformance.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], GlooPool]]:
    """gloo(n) is the session's pool of n ranks; no process outlives the session."""
    pools: dict[int, GlooPool] = {}

    def pool(world_size: int) -> GlooPool:
        if world_size not in pools:
            pools[world_size] = GlooPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()

"""Fixtures: vLLM ready for MegaMoE, and steps remembered by their arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from model.subject import prepare
from tests.model.overlay.drive import Arm, Built, Step

Stepped = Callable[[Arm], Step]

# Building costs ten times a step; more open worlds would only hold memory.
_OPEN_WORLDS = 6


@pytest.fixture(scope="session")
def mega_ready() -> None:
    """vLLM's MiniMax-M3 imported, and the override table with MegaMoE's rows installed."""
    prepare()


@pytest.fixture(scope="session")
def steps_done() -> dict[Arm, Step]:
    """The steps that were run so far."""
    return {}


@pytest.fixture(scope="module")
def stepped(mega_ready: None, steps_done: dict[Arm, Step]) -> Iterator[Stepped]:
    """stepped(arm) -> its step, run once; arms that differ in their input share a world.

    The worlds are of the file: the workers steal tests from each other, so that any other folder's
    may come next, and some of them look at all ranks of the process.
    """
    worlds: dict[Arm, Built] = {}

    def step(arm: Arm) -> Step:
        if arm not in steps_done:
            key = arm.but(tokens=0, padded=0, aux=())
            built = worlds.pop(key, None) or Built(arm)
            worlds[key] = built
            if len(worlds) > _OPEN_WORLDS:
                worlds.pop(next(iter(worlds))).close()
            steps_done[arm] = built.step(arm)
        return steps_done[arm]

    yield step
    for built in worlds.values():
        built.close()

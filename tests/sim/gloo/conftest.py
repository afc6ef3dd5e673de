"""One pool of rank processes for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sim.gloo import GlooPool


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    """A pool without any preparation: torch alone."""
    with GlooPool() as pool:
        yield pool

"""Fixtures for MegaMoE's tests."""

import pytest

from model.subject import prepare


@pytest.fixture(scope="session")
def mega_ready() -> None:
    """vLLM imported, and the override table with MegaMoE's rows installed."""
    prepare()

"""Faults of operands: each is caught as what it is, where it is, and leaves nothing behind."""

from __future__ import annotations

import pytest

from model.subject import prepare
from properties.faults.fault import Fault
from properties.faults.operands import FAULTS
from tests.properties.faults.run import (
    assert_shown,
    clean,
    headline,
    hides,
    shows,
    smallest,
)

VAGUE = {
    # No check compares the map in use with the slots as loaded.
    "expert-map-off-by-one": "wrong values",
}
"""Faults whose class the checks do not tell yet, with what they say instead."""


@pytest.fixture(scope="module", autouse=True)
def m3() -> None:
    """vLLM's modules, with the overrides installed: faults patch them."""
    prepare()


@shows(FAULTS)
def test_is_caught_as_what_it_is(fault: Fault, word: str) -> None:
    assert_shown(fault, word, VAGUE)


@hides(FAULTS)
def test_does_not_show_everywhere(fault: Fault, word: str) -> None:
    assert headline(fault, word) is None


@smallest(FAULTS)
def test_leaves_nothing_behind(fault: Fault, word: str) -> None:
    with clean(fault, word):
        headline(fault, word)

"""What goes wrong between two stages is named: where it was sent, or where it arrived."""

from __future__ import annotations

import pytest

from properties.faults import Fault, boundary, receive, transport
from tests.properties.faults import trials

FAULTS = (*boundary.FAULTS, *receive.FAULTS, *transport.FAULTS)


@pytest.fixture(scope="module")
def clean() -> trials.Clean:
    return trials.Clean(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_leaves_nothing_behind(clean: trials.Clean, fault: Fault) -> None:
    clean.assert_no_trace(fault)


@pytest.mark.parametrize(("fault", "topology"), trials.cases(FAULTS, "shows"))
def test_is_named_rightly(fault: Fault, topology: str) -> None:
    trials.assert_right(fault, topology)


@pytest.mark.parametrize(("fault", "topology"), trials.cases(FAULTS, "hides"))
def test_hides(fault: Fault, topology: str) -> None:
    trials.assert_hidden(fault, topology)


def named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def test_a_buffer_reused_in_flight_hides_where_delivery_is_prompt() -> None:
    fault = named("send-buffer-reused")
    one = trials.example((("late", False),), "tp2pp2")
    assert trials.judged(one, fault.apply()) is None


def test_the_cross_match_hides_without_aux_hidden_states() -> None:
    fault = named("aux-transfer-cross-matches")
    one = trials.example((("layers", "dmd"),), "tp2pp3")
    assert trials.judged(one, fault.apply()) is None

"""Aux hidden states that are lost, of another layer, or not whole are named."""

from __future__ import annotations

import pytest

from properties.faults import Fault, aux, aux_shards
from tests.properties.faults import trials

FAULTS = (*aux.FAULTS, *aux_shards.FAULTS)

NAMED_WRONGLY = {
    "aux-one-layer-late-pp2": "taps after the stage boundary are not looked at",
}
"""Faults that are caught, and whose headline has another class or place than it should."""


@pytest.fixture(scope="module")
def clean() -> trials.Clean:
    return trials.Clean(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_leaves_nothing_behind(clean: trials.Clean, fault: Fault) -> None:
    clean.assert_no_trace(fault)


@pytest.mark.parametrize(("fault", "topology"), trials.cases(FAULTS, "shows", NAMED_WRONGLY))
def test_is_named_rightly(fault: Fault, topology: str) -> None:
    trials.assert_right(fault, topology)


@pytest.mark.parametrize(("fault", "topology"), trials.named_wrongly(FAULTS, NAMED_WRONGLY))
def test_is_caught_where_it_is_named_wrongly(fault: Fault, topology: str) -> None:
    trials.assert_caught(fault, topology)


@pytest.mark.parametrize(("fault", "topology"), trials.cases(FAULTS, "hides"))
def test_hides(fault: Fault, topology: str) -> None:
    trials.assert_hidden(fault, topology)


# Without aux hidden states the last fault still crosses the parts of the stream.
OF_AUX_ALONE = [fault for fault in FAULTS if fault.name != "aux-unpacked-out-of-order"]


@pytest.mark.parametrize("fault", OF_AUX_ALONE, ids=lambda fault: fault.name)
def test_hides_where_no_aux_is_asked_for(fault: Fault) -> None:
    without = [field for field in fault.needs if field[0] != "aux"]
    assert trials.judged(trials.example(without, fault.shows[0]), fault.apply()) is None

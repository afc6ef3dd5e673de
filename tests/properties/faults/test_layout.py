"""Streams sharded by token whose rows are at the wrong rank, or not gathered, are named."""

from __future__ import annotations

import pytest

from properties.faults import Fault, final_gather, layout
from tests.properties.faults import trials

FAULTS = (*layout.FAULTS, *final_gather.FAULTS)

NAMED_WRONGLY = {
    "sp-dense-mlp-on-its-shard": "a sum over different tokens is no reading",
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


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("sp-gather-by-row-count", 5),
        ("sp-fallback-forgets-attention", 4),
        ("sp-final-gather-keeps-pads", 8),
        ("sp-scatter-pads-in-front", 8),
    ],
)
def test_hides_where_the_tokens_fit(name: str, tokens: int) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    one = trials.example((*fault.needs, ("seq_lens", (tokens,))), "tep4")
    assert trials.judged(one, fault.apply()) is None

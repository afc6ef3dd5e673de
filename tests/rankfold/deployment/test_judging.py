"""What fails first on the way of a request is what is said: prefill, hand-over, decode."""

from __future__ import annotations

import pytest

from model.subject import prepare
from properties.faults import FAULTS
from rankfold.faults.trial import examine_hand_overs
from rankfold.rig import Rig


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    prepare()


def test_a_fault_of_the_prefilling_side_is_said_before_what_follows() -> None:
    """Both sides run the same code; the prefilling one runs it first."""
    with FAULTS["attention-reduced-twice"].apply(), Rig() as rig:
        first = examine_hand_overs(rig, "1p1d-tp2-tp2", 3).headline
    assert first is not None and first.what.startswith("prefill0.dp0: ")
    assert first.kind == "counted too often" and first.at == "layers.0.residual"


def test_a_fault_that_the_prefilling_side_hides_is_said_of_the_other() -> None:
    with FAULTS["attention-reduced-twice"].apply(), Rig() as rig:
        judged = examine_hand_overs(rig, "1p1d-tp1-tp2", 3)
    first = judged.headline
    assert first is not None and first.what.startswith("decode0.dp0: ")
    assert first.kind == "counted too often" and "request" in first.where
    # The hand-over itself was right.
    assert next(check for check in judged.checks if check.name == "hand-over").ok


def test_a_hand_over_is_said_before_what_it_does_to_decoding() -> None:
    with FAULTS["handover-indexer-left"].apply(), Rig() as rig:
        first = examine_hand_overs(rig, "1p1d-tp2-tp4", 6).headline
    assert first is not None and first.name == "hand-over" and "index" in first.at


def test_a_dp_fault_is_found_while_requests_are_served() -> None:
    with FAULTS["dep-dispatch-does-nothing"].apply(), Rig() as rig:
        first = examine_hand_overs(rig, "1p1d-tp1-dep2", 6).headline
    assert first is not None and first.what.startswith("decode0.dp")
    assert first.at == "layers.1.ffn"

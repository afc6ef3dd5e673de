"""Reductions left out, or left to somebody who does not do them, are named."""

from __future__ import annotations

import pytest

from properties.faults import Fault, deferred, missing
from tests.properties.faults import trials

FAULTS = (*missing.FAULTS, *deferred.FAULTS)


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


def test_the_frozen_decision_is_right_for_the_batch_it_was_taken_for() -> None:
    fault = named("reduce-decision-frozen")
    one = trials.example((*fault.needs, ("seq_lens", (deferred.CAPTURED_FOR,))), "tp2pp2")
    assert trials.judged(one, fault.apply()) is None


def test_the_repair_of_both_halves_is_right() -> None:
    """The twin of the pair: the next norm reduces for the experts, and for nobody else."""
    for topology in ("tp2pp2", "tep4pp2"):
        one = trials.example((("layers", "dmdm"),), topology)
        assert trials.judged(one, deferred.norm_reduces(after_dense_too=False)) is None


def test_one_token_is_what_a_skipped_scatter_needs() -> None:
    fault = named("sp-one-token-not-reduced")
    one = trials.example((*fault.needs, ("seq_lens", (5,))), "tep2")
    assert trials.judged(one, fault.apply()) is None

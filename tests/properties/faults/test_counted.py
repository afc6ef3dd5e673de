"""Sums of what is summed or whole already are named: so many times too often, and where."""

from __future__ import annotations

import pytest

from properties.faults import Fault, counted, counted_outside_moe
from properties.faults.patches import MEGA
from tests.properties.faults import trials

FAULTS = (*counted.FAULTS, *counted_outside_moe.FAULTS)


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


def test_scaling_twice_hides_in_a_batch_that_is_not_split() -> None:
    fault = named("routed-scaling-twice-in-overlap")
    one = trials.example((*fault.needs, ("seq_lens", (3,))), "tp2")
    assert trials.judged(one, fault.apply()) is None


@pytest.mark.parametrize(
    "name", ["moe-reduced-by-model-again", "shared-expert-reduced-first", "residual-in-the-moe-sum"]
)
def test_faults_of_the_runner_hide_with_mega_moe(name: str) -> None:
    one = trials.example((MEGA,), "tep2pp2")
    assert trials.judged(one, named(name).apply()) is None

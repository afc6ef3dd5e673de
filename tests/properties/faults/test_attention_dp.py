"""Sums of attention DP: each is caught as what it is, where it is, and leaves nothing behind."""

from __future__ import annotations

from properties.faults.attention_dp import FAULTS
from properties.faults.fault import Fault
from properties.faults.judged import judge_program
from properties.faults.program import ProgramFault, spread
from sim import Topology
from tests.properties.faults.run import (
    assert_shown,
    clean,
    headline,
    hides,
    shows,
    smallest,
)

VAGUE: dict[str, str] = {}
"""Faults whose class the checks do not tell yet, with what they say instead."""


@shows(FAULTS)
def test_is_caught_as_what_it_is(fault: Fault, word: str) -> None:
    assert_shown(fault, word, VAGUE)


@hides(FAULTS)
def test_does_not_show_everywhere(fault: Fault, word: str) -> None:
    assert headline(fault, word) is None


def test_even_batches_hide_what_uneven_ones_show() -> None:
    hiding = [f for f in FAULTS if isinstance(f, ProgramFault) and f.hiding_tokens]
    assert hiding
    for fault in hiding:
        topology = Topology.parse(fault.shows[0])
        tokens = spread(fault.hiding_tokens, topology)
        with fault.apply():
            judged = judge_program(fault.program, topology, tokens, fault.schedule)
        assert judged.ok, (fault.name, judged.headline)


@smallest(FAULTS)
def test_leaves_nothing_behind(fault: Fault, word: str) -> None:
    with clean(fault, word):
        headline(fault, word)

"""The folded transport tells the truth: programs give the same folded, over gloo and in numpy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.sim.conformance.case import Case
from tests.sim.conformance.cases import CASES
from tests.sim.conformance.compare import as_wanted, difference, expected, folded, roundings
from tests.sim.conformance.gloo_pool import GlooPool, Invocation

Pools = Callable[[int], GlooPool]

EXAMPLES = 3
"""Draws of sizes and seeds for each case; every dtype and reduce op runs in each."""


def batch_of(case: Case, data: st.DataObject) -> list[Invocation]:
    """All variants of a case, with options drawn."""
    drawn = {name: data.draw(options, name) for name, options in case.draws.items()}
    seed = data.draw(st.integers(0, 9999), "seed")
    return [
        Invocation(program=case.program, seed=seed, options={**variant, **drawn})
        for variant in case.variants
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=EXAMPLES, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_folded_is_real(name: str, ranks: int, gloo: Pools, data: st.DataObject) -> None:
    """Whatever the schedule, folded results are gloo's, and the reference's within its bound."""
    case = CASES[name]
    batch = batch_of(case, data)
    schedule = data.draw(st.none() | st.integers(0, 9999), "schedule")
    ours = folded(ranks, schedule, batch)
    theirs = gloo(ranks).run(*batch) if case.gloo else ours
    for invocation, mine, real in zip(batch, ours, theirs, strict=True):
        if ranks == 2 or not roundings(invocation, ranks):
            wrong = difference(mine, as_wanted(real, invocation), None)
            assert not wrong, f"{invocation}, folded against gloo: {wrong}"
        if case.truth is not None:
            wanted, bound = expected(case, invocation, ranks)
            for who, results in (("folded", mine), ("gloo", real)):
                wrong = difference(results, wanted, bound)
                assert not wrong, f"{invocation}, {who} against the reference: {wrong}"

"""How a fault on the real MiniMax-M3 is tried: where it shows, where it hides, what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from model.subject import prepare
from properties import Verdict
from properties.faults import Fault
from rankfold.corpus import batch_of
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.options import MEGA_MOE
from rankfold.rig import Rig
from sim import Topology

VOCABULARY = 256


def example(needs: Iterable[tuple[str, object]], topology: str) -> Example:
    """The smallest example with these fields: five tokens in one sequence, a dense layer and a MoE
    layer, unless they say otherwise; more MoE layers where there are more stages."""
    fields: dict[str, Any] = {"seq_lens": (5,), "layers": "dm", **dict(needs)}
    stages = Topology.parse(topology).pp
    fields["layers"] = fields["layers"].ljust(stages, "m")
    if fields.get("moe_backend") == MEGA_MOE:
        fields["dtype"] = "bfloat16"
    return Example(topology=topology, token_ids=batch_of(fields["seq_lens"], VOCABULARY), **fields)


def judged(one: Example, applied: AbstractContextManager[None] | None = None) -> Verdict | None:
    """The headline of an example, with a fault on; None if every check holds."""
    prepare()
    # A model that was built before a fault was on would hide it.
    with applied or nullcontext(), Examiner() as examiner:
        return examiner.examine(one).headline


def cases(
    faults: Iterable[Fault], which: str, not_yet: Mapping[str, str] | None = None
) -> list[Any]:
    """(fault, topology) for each topology of a field of the faults, as pytest's parameters.

    Args:
        faults: what to try.
        which: "shows" or "hides".
        not_yet: why a fault is named wrongly so far, by its name, or by name and topology as in
            "fault-tp2". As soon as one is named rightly, its test fails until it is taken off.
    """
    found = []
    for fault in faults:
        for topology in getattr(fault, which):
            word = f"{fault.name}-{topology}"
            reason = (not_yet or {}).get(fault.name) or (not_yet or {}).get(word)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            found.append(pytest.param(fault, topology, id=word, marks=marks))
    return found


def named_wrongly(faults: Iterable[Fault], not_yet: Mapping[str, str]) -> list[Any]:
    """The (fault, topology) of `cases` that a list of wrong names is about."""
    return [
        pytest.param(fault, topology, id=f"{fault.name}-{topology}")
        for fault in faults
        for topology in fault.shows
        if fault.name in not_yet or f"{fault.name}-{topology}" in not_yet
    ]


def assert_caught(fault: Fault, topology: str) -> Verdict:
    """Some check fails; returns the headline."""
    headline = judged(example(fault.needs, topology), fault.apply())
    assert headline is not None, f"{fault.name} on {topology} is not caught"
    return headline


def assert_right(fault: Fault, topology: str) -> None:
    """The headline has the fault's class, and is about its place."""
    headline = assert_caught(fault, topology)
    assert headline.kind in fault.kinds, f"{headline.kind!r}: {headline.where}: {headline.why}"
    places = (headline.at, headline.where)
    assert any(part in place for part in fault.at for place in places), places


def assert_hidden(fault: Fault, topology: str) -> None:
    """Every check holds although the fault is on."""
    headline = judged(example(fault.needs, topology), fault.apply())
    assert headline is None, f"{headline.what}: {headline.where}: {headline.why}"


class Clean:
    """Runs without any fault, of the examples that a list of faults shows on."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        """Run them all, before any of the faults is on."""
        self._before = {one: values(one) for one in {self.of(fault) for fault in faults}}

    @staticmethod
    def of(fault: Fault) -> Example:
        """The smallest example that shows the fault."""
        return example(fault.needs, fault.shows[0])

    def assert_no_trace(self, fault: Fault) -> None:
        """A run after the fault, with models of its own, has the bits of one that never saw it."""
        one = self.of(fault)
        with fault.apply(), Examiner() as examiner:
            examiner.examine(one)
        after, before = values(one), self._before[one]
        assert after.keys() == before.keys()
        for name, value in after.items():
            assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name


def values(one: Example) -> dict[str, torch.Tensor]:
    """Every tap of every rank of a run on new worlds and models, contiguous."""
    prepare()
    with Rig() as rig:
        outcome = rig.step(one.options(), one.batch(), schedule=one.run_schedule())
    assert outcome.broke is None
    return {
        f"rank {rank}, {name}": tap.value.contiguous()
        for rank, taps in enumerate(outcome.captured)
        for name, tap in taps.items()
    }

"""How a fault is tried: where it shows, where it hides, and what it leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from model.subject import prepare
from model.taps import Captured
from properties import Verdict
from properties.faults import Fault
from properties.faults.deployment import DeploymentFault
from properties.faults.handover import HandOverFault
from properties.faults.judged import judge_program
from properties.faults.program import ProgramFault, spread
from rankfold.data_parallel import examine
from rankfold.examiner import Examiner, References
from rankfold.example import Example
from rankfold.faults.trial import dp_options, examine_hand_overs, example_of, is_at
from rankfold.rig import Rig
from sim import Topology
from sim.buffers import same_bits

REFERENCES = References()
"""They do not depend on the code that faults change, so all trials share them."""


def cases(faults: Iterable[Fault], which: str) -> pytest.MarkDecorator:
    """Each fault with each topology of a field of it, "shows" or "hides"."""
    pairs = [(fault, word) for fault in faults for word in getattr(fault, which)]
    names = [f"{fault.name}-{word}" for fault, word in pairs]
    return pytest.mark.parametrize(("fault", "word"), pairs, ids=names)


def example(fault: Fault, word: str, without: Iterable[str] = (), **changes: object) -> Example:
    """The smallest step that a fault on MiniMax-M3 needs: five tokens in one sequence, unless it
    says otherwise.

    Args:
        fault: what says what is needed.
        word: the topology.
        without: fields that it needs, and is not given.
        changes: fields that are different.
    """
    needs = {name: value for name, value in fault.needs if name not in without}
    fields: dict[str, object] = {"seq_lens": (5,), **needs, **changes}
    lens: tuple[int, ...] = fields.pop("seq_lens")  # type: ignore[assignment]
    return example_of(word, sum(lens), fields, lens)


def judged(one: Example, applied: AbstractContextManager[None] | None = None) -> Verdict | None:
    """The headline of an example, with a fault on; None if every check holds."""
    prepare()
    # A model that was built before a fault was on would hide it.
    with applied or nullcontext(), Examiner(REFERENCES) as examiner:
        return examiner.examine(one).headline


def headline(fault: Fault, word: str, tokens: tuple[int, ...] | None = None) -> Verdict | None:
    """What a person reads first with the fault on; None if every check holds.

    tokens: of DP ranks with tokens of their own, over and over; the fault's own by default.
    """
    if isinstance(fault, HandOverFault):
        prepare()
        with fault.apply(), Rig(weights=REFERENCES.weights) as rig:
            return examine_hand_overs(rig, word, fault.requests).headline
    topology = Topology.parse(word)
    if isinstance(fault, DeploymentFault):
        prepare()
        given = spread(tokens or fault.tokens, topology)
        with fault.apply(), Rig(weights=REFERENCES.weights) as rig:
            return examine(rig, dp_options(word, given))[0].headline
    if not isinstance(fault, ProgramFault):
        return judged(example(fault, word), fault.apply())
    given = spread(tokens or fault.tokens, topology)
    with fault.apply():
        return judge_program(fault.program, topology, given, fault.schedule).headline


def assert_named(fault: Fault, word: str, wrongly: Mapping[str, str]) -> None:
    """The headline has the fault's class, and is about its place.

    wrongly: the class that the checks say instead, by a fault's name, or by name and topology as in
        "fault-tp2". Once they know better, the entry has to go.
    """
    verdict = headline(fault, word)
    assert verdict is not None, f"{fault.name} is not caught on {word}"
    right = verdict.kind in fault.kinds
    assert is_at(fault, verdict), verdict
    said = wrongly.get(fault.name) or wrongly.get(f"{fault.name}-{word}")
    if said is None:
        assert right, verdict
    else:
        assert verdict.kind == said and not right, verdict


def assert_no_trace(fault: Fault, word: str) -> None:
    """A run after the fault, with models of its own, has the bits of one that never saw it."""
    before = _before(fault, word)
    headline(fault, word)
    after = _taps(fault, word)
    assert [*before] == [*after]
    for name, value in before.items():
        # Padding rows may be no numbers, which equal nothing: so bits are compared.
        assert same_bits(value, after[name]), f"{name} differs after {fault.name}"


def _before(fault: Fault, word: str) -> dict[str, torch.Tensor]:
    if isinstance(fault, (ProgramFault, DeploymentFault, HandOverFault)):
        return _taps(fault, word)
    return _first(example(fault, word))


@functools.cache
def _first(one: Example) -> dict[str, torch.Tensor]:
    """The first run of an example in this process: whatever left a trace since then shows."""
    return _of_model(one)


def _taps(fault: Fault, word: str) -> dict[str, torch.Tensor]:
    """Every tap of every rank of a run without the fault."""
    if isinstance(fault, HandOverFault):
        prepare()
        with Rig(weights=REFERENCES.weights) as rig:
            found = examine_hand_overs(rig, word, fault.requests)
        assert found.headline is None, found.headline
        return {tap.name: torch.tensor(tap.max_abs_err) for tap in found.taps}
    topology = Topology.parse(word)
    if isinstance(fault, DeploymentFault):
        prepare()
        with Rig(weights=REFERENCES.weights) as rig:
            right, outcome = examine(rig, dp_options(word, spread(fault.tokens, topology)))
        assert right.ok and outcome is not None, right.headline
        return _flat(outcome.captured)
    if not isinstance(fault, ProgramFault):
        return _of_model(example(fault, word))
    given = spread(fault.tokens, topology)
    judged = judge_program(fault.program, topology, given, fault.schedule)
    assert judged.ok, judged.headline
    return _flat(judged.captured)


def _of_model(one: Example) -> dict[str, torch.Tensor]:
    prepare()
    with Rig(weights=REFERENCES.weights) as rig:
        outcome = rig.step(one.options(), one.batch(), schedule=one.run_schedule())
    assert outcome.broke is None
    return _flat(outcome.captured)


def _flat(captured: Iterable[Mapping[str, Captured]]) -> dict[str, torch.Tensor]:
    return {
        f"rank {rank}, {name}": tap.value
        for rank, taps in enumerate(captured)
        for name, tap in taps.items()
    }

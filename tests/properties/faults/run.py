"""Running faults in tests: under the examiner, or in a stand-in program, and without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from model.taps import Captured
from properties import Verdict
from properties.faults.fault import Fault
from properties.faults.judged import judge_program
from properties.faults.program import ProgramFault, spread
from rankfold.corpus import batch_of
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.rig import Rig
from sim import Topology

TOKENS = 5
VOCABULARY = 256


def shows(faults: tuple[Fault, ...]) -> pytest.MarkDecorator:
    """Every fault with each topology that shows it."""
    return _pairs((fault, word) for fault in faults for word in fault.shows)


def hides(faults: tuple[Fault, ...]) -> pytest.MarkDecorator:
    """Every fault with each topology that hides it."""
    return _pairs((fault, word) for fault in faults for word in fault.hides)


def smallest(faults: tuple[Fault, ...]) -> pytest.MarkDecorator:
    """Every fault with the smallest topology that shows it."""
    return _pairs((fault, fault.shows[0]) for fault in faults)


def _pairs(pairs: Iterator[tuple[Fault, str]]) -> pytest.MarkDecorator:
    cases = [pytest.param(fault, word, id=f"{fault.name}-{word}") for fault, word in pairs]
    return pytest.mark.parametrize(("fault", "word"), cases)


def example(fault: Fault, word: str) -> Example:
    """The smallest step that a fault on MiniMax-M3 needs."""
    needs: dict[str, Any] = dict(fault.needs)
    fields: dict[str, Any] = {
        "layers": "dm",
        "dtype": "bfloat16" if "moe_backend" in needs else "float32",
        "token_ids": batch_of((TOKENS,), VOCABULARY),
        "seq_lens": (TOKENS,),
    }
    return Example(topology=word, **{**fields, **needs})


def headline(fault: Fault, word: str) -> Verdict | None:
    """What a person reads first with the fault on; None if every check holds."""
    if isinstance(fault, ProgramFault):
        topology = Topology.parse(word)
        with fault.apply():
            tokens = spread(fault.tokens, topology)
            return judge_program(fault.program, topology, tokens, fault.schedule).headline
    with fault.apply(), Examiner() as examiner:
        return examiner.examine(example(fault, word)).headline


def is_right(fault: Fault, verdict: Verdict) -> tuple[bool, bool]:
    """Whether a verdict names the fault's class, and its place."""
    placed = any(part in verdict.at or part in verdict.where for part in fault.at)
    return verdict.kind in fault.kinds, placed


def assert_shown(fault: Fault, word: str, vague: dict[str, str]) -> None:
    """The headline has the right class and place.

    vague: faults whose class the checks cannot tell, with the class that they say instead.
    """
    verdict = headline(fault, word)
    assert verdict is not None, f"{fault.name} is not caught at {word}"
    kind, placed = is_right(fault, verdict)
    assert placed, verdict
    if fault.name in vague:
        # Not the class that it should be; once the checks know better, the entry has to go.
        assert verdict.kind == vague[fault.name], verdict
        assert not kind
    else:
        assert kind, verdict


@contextmanager
def clean(fault: Fault, word: str) -> Iterator[None]:
    """Around: the same run, bit for bit, before and after."""
    before = _taps(fault, word)
    yield
    after = _taps(fault, word)
    assert [*before] == [*after]
    for name, value in before.items():
        assert _same_bits(value, after[name]), f"{name} differs after {fault.name}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal: padding rows may be no numbers, which equal nothing."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _taps(fault: Fault, word: str) -> dict[str, torch.Tensor]:
    return _of_program(fault, word) if isinstance(fault, ProgramFault) else _of_model(fault, word)


def _of_program(fault: ProgramFault, word: str) -> dict[str, torch.Tensor]:
    topology = Topology.parse(word)
    tokens = spread(fault.tokens, topology)
    judged = judge_program(fault.program, topology, tokens, fault.schedule)
    assert judged.ok, judged.headline
    return _flat(judged.captured)


def _of_model(fault: Fault, word: str) -> dict[str, torch.Tensor]:
    step = example(fault, word)
    with Rig() as rig:
        outcome = rig.step(step.options(), step.batch())
    assert outcome.broke is None
    return _flat(outcome.captured)


def _flat(captured: Any) -> dict[str, torch.Tensor]:
    flat = {}
    for rank, taps in enumerate(captured):
        for name, tap in taps.items():
            assert isinstance(tap, Captured)
            flat[f"{rank} {name}"] = tap.value
    return flat

"""What a case of the conformance suite is, and how its variants are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from tests.sim.conformance.gloo_pool import Program
from tests.sim.conformance.operands import Kind
from tests.sim.conformance.truths import Truth

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the suite."""

    name: str
    program: Program
    draws: Options = field(default_factory=dict)
    """Strategies of options that hypothesis draws."""
    variants: tuple[Options, ...] = ({},)
    """Options that are all run, in one batch, with what was drawn."""
    truth: Truth | None = None
    """The numpy reference, which takes the same options but for `kind`."""
    gloo: bool = True
    why: str = ""
    """Where gloo cannot do it: what it does instead."""
    error: str = ""
    """Words of gloo's error, where it has one; else it hangs, or goes wrong in silence."""

    def __post_init__(self) -> None:
        if self.gloo == bool(self.why):
            raise ValueError(f"{self.name}: say why if gloo cannot do it, and only then")
        if not self.gloo and self.truth is None:
            raise ValueError(f"{self.name}: without gloo it needs a truth")


def each(**choices: Sequence[Any]) -> tuple[Options, ...]:
    """Every combination, as options: each(op=("sum", "max"), kind=kinds(...))."""
    return tuple(dict(zip(choices, values, strict=True)) for values in product(*choices.values()))


def kinds(dtypes: Sequence[torch.dtype], *values: Any, layouts: Any = ("packed",)) -> list[Kind]:
    """Kinds of operands: every dtype with every sort of values and every layout."""
    return [Kind(dtype=d, values=v, layout=w) for d in dtypes for v in values for w in layouts]

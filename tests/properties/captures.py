"""Made-up taps for the tests of the checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tap:
    """One tap on one rank."""

    value: torch.Tensor
    declared: str = "replicate"


def full(rows: int = 4, features: int = 3) -> torch.Tensor:
    """A full value, float64 [rows, features], with no zero and no two rows alike."""
    return torch.arange(1.0, rows * features + 1, dtype=torch.float64).view(rows, features)


def with_rows(value: torch.Tensor, rows: list[int], instead: float) -> torch.Tensor:
    """The value with these rows replaced."""
    value = value.clone()
    value[rows] = instead
    return value


def captured(
    name: str, *values: torch.Tensor | None, declared: str = "replicate"
) -> list[dict[str, Tap]]:
    """A tap of this name on each rank; None where a rank does not have it."""
    return [{} if v is None else {name: Tap(v, declared)} for v in values]

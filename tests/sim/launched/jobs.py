"""What the tests of launched ranks hand to the process that torchrun starts, and get back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim.ledger import Entry


@dataclass(frozen=True, kw_only=True)
class Job:
    """The runs of one world."""

    topology: str
    runs: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
    """Programs and their arguments."""
    staged: bool = False
    """Whether tensors go the way of those on a shared GPU."""
    look: Callable[..., Any] | None = None
    """Asked of every rank after a run that broke."""
    limit: float = 30.0


@dataclass(kw_only=True)
class Done:
    """What came of a job."""

    results: list[list[Any]] = field(default_factory=list)
    """For each run that held, by rank."""
    kind: str = ""
    """Of the error that ended it."""
    said: str = ""
    ledgers: list[list[Entry]] = field(default_factory=list)
    looked: list[Any] = field(default_factory=list)

"""One line of the verdict table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "N/A"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A named check."""

    name: str
    verdict: Verdict
    reason: str
    """What was seen, or why nothing was."""


def passed(name: str, ok: bool, reason: str) -> Row:
    """PASS or FAIL."""
    return Row(name=name, verdict="PASS" if ok else "FAIL", reason=reason)


def not_run(name: str, reason: str) -> Row:
    """N/A."""
    return Row(name=name, verdict="N/A", reason=reason)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows have each verdict."""
    return {verdict: sum(row.verdict == verdict for row in rows) for verdict in _VERDICTS}


_VERDICTS: tuple[Verdict, ...] = ("PASS", "FAIL", "N/A")

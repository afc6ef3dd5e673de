"""The findings of a run, in program order, and what a person has allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from properties.sanitizer.finding import Allow, AllowError, Finding
from properties.sanitizer.rules import Rule, Said
from sim.callsite import Frame

Place = tuple[str, tuple[int, ...], tuple[Frame, ...]]
"""Op, global ranks and frames of an operation."""


class Book:
    """Findings: those at the same place that say the same are one, with a count."""

    def __init__(self, allow: Iterable[Allow], rules: Sequence[Rule]) -> None:
        """Start empty.

        Raises:
            AllowError: an `Allow` names no rule.
        """
        self._allow = tuple(allow)
        self._found: dict[tuple[str, Place, str], Finding] = {}
        names = [rule.name for rule in rules]
        for each in self._allow:
            if each.rule not in names:
                raise AllowError(f"allow {each.rule!r}: no such rule; use {', '.join(names)}")

    def entries(self) -> list[tuple[Place, Finding]]:
        """What was found, each with its place."""
        return [(place, finding) for (_, place, _), finding in self._found.items()]

    def finding(self, rule: str, place: Place, said: Said, operation: str, group: str) -> Finding:
        """A finding, marked if it is allowed; it is not entered."""
        _, ranks, frames = place
        allowed = next((each.reason for each in self._allow if each.covers(rule, frames)), None)
        return Finding(
            rule=rule,
            what=said.what,
            why=said.why,
            operation=operation,
            group=group,
            ranks=ranks,
            frames=frames,
            allowed=allowed,
        )

    def enter(self, place: Place, finding: Finding) -> None:
        """Enter a finding, or count it if it is there."""
        key = (finding.rule, place, finding.what)
        before = self._found.get(key)
        self._found[key] = finding if before is None else replace(before, times=before.times + 1)

    def clear(self) -> None:
        """Forget all findings."""
        self._found.clear()

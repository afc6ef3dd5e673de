"""What the lint says: findings, findings that were allowed, and what it could not judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def printable(text: str) -> str:
    """The text with everything that could steer a terminal, or end a line, written as an escape.

    Values of a recipe are other people's text.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, at one place."""

    rule: str
    path: str
    line: int
    """1-based."""
    column: int
    """1-based, in characters."""
    message: str
    """What is wrong: one sentence, without the place."""
    suggestion: str = ""
    """What to write instead, or what to do; empty if only the author can know."""

    @property
    def order(self) -> tuple[str, int, int, str, str]:
        """By file, then by place."""
        return (self.path, self.line, self.column, self.rule, self.message)

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "rule": self.rule,
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "suggestion": self.suggestion,
        }


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """A finding that a comment in the file allows, and why."""

    finding: Finding
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data, with the reason."""
        return {**self.finding.to_json(), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that could not be judged from the files at hand. No finding."""

    path: str
    line: int
    message: str

    def to_json(self) -> dict[str, Any]:
        """The note as plain data."""
        return {"path": self.path, "line": self.line, "message": self.message}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a lint of some files has found."""

    files: tuple[str, ...]
    findings: tuple[Finding, ...]
    allowed: tuple[Allowed, ...]
    notes: tuple[Note, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding that is not allowed."""
        return not self.findings

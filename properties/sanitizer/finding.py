"""What the sanitizer finds, and what a person allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.callsite import Frame


class AllowError(ValueError):
    """An `Allow` that cannot work; the message is one line that says what would be right."""


@dataclass(frozen=True, kw_only=True)
class Allow:
    """A site known to be good: its findings are kept, and marked with the reason."""

    rule: str
    """The rule's name."""
    site: str
    """`path:line`, or a path; either may leave out leading folders. The innermost frame of the
    caller's code, or one of the three around it."""
    reason: str
    """Why this is right; it must not be empty."""

    def __post_init__(self) -> None:
        if not self.site.strip() or not self.reason.strip():
            raise AllowError(f"allow {self.rule!r}: give a site (file:line) and a reason")

    def covers(self, rule: str, frames: tuple[Frame, ...]) -> bool:
        """Whether a finding of this rule at these frames is allowed."""
        if rule != self.rule:
            return False
        want = "/" + self.site.lstrip("/")
        for frame in frames:
            path = "/" + frame.file.replace("\\", "/").lstrip("/")
            if path.endswith(want) or f"{path}:{frame.line}".endswith(want):
                return True
        return False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One wrong operation, or several at the same site that are wrong in the same way."""

    rule: str
    what: str
    """What is wrong, in one line."""
    why: str
    """The likely cause and what to do."""
    operation: str
    """The operation with its operands, such as "all_reduce(sum) float32[4, 8]"."""
    group: str
    """The group's name, such as "tp"."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    frames: tuple[Frame, ...]
    """Where in the caller's code the first rank called it, the innermost frame first."""
    times: int = 1
    """How often it happened."""
    allowed: str | None = None
    """The reason why it is allowed, if it is."""

    @property
    def site(self) -> str:
        """file:line of the call."""
        return str(self.frames[0]) if self.frames else ""

    @property
    def where(self) -> str:
        """Operation, group, ranks and source line, in one line."""
        at = f" at {self.site}" if self.frames else ""
        often = f", {self.times} times" if self.times > 1 else ""
        return f"{self.operation} on {self.group}{list(self.ranks)}{at}{often}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "rule": self.rule,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "allowed": self.allowed,
            "operation": self.operation,
            "group": self.group,
            "ranks": list(self.ranks),
            "site": self.site,
            "times": self.times,
        }

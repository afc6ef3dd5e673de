"""The answer of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a check holds; if not, what is wrong, where, and why."""

    name: str
    """The check's name."""
    ok: bool
    what: str
    """What was checked, or what is wrong, in one line."""
    where: str = ""
    """Tap, ranks and rows, when something is wrong."""
    why: str = ""
    """The likely cause, when something is wrong."""
    kind: str = ""
    """The class of fault, in a few fixed words such as "counted too often", when it is wrong."""
    at: str = ""
    """The tap, module or operation where it shows, and nothing else, when it is wrong."""
    rows: tuple[int, ...] = ()
    """The rows that are wrong, where they can be told."""

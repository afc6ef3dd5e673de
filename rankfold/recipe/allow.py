"""Comments that allow a finding: `# rankfold: allow RULE: reason`.

At the end of a line the comment is for that line. On a line of its own it is for the comments that
it stands among and for the first line after them. What is allowed is still shown, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rankfold.recipe.finding import Allowed, Finding, Note
from rankfold.recipe.keys import near
from rankfold.recipe.rules import RULES
from rankfold.recipe.source import Comment, Source

RULE = "allow"

_FORM = "write # rankfold: allow RULE: reason"
_ALLOW = re.compile(r"\s*rankfold:\s*allow\s+(?P<rule>[\w-]+)\s*:\s*(?P<reason>\S.*?)\s*")
_MEANT = re.compile(r"\s*rankfold\s*:", re.IGNORECASE)


def is_ours(comment: Comment) -> bool:
    """Whether a comment speaks to this tool, and so describes nothing."""
    return _MEANT.match(comment.text) is not None


@dataclass(frozen=True, kw_only=True)
class _Permit:
    rule: str
    reason: str
    lines: range
    at: Comment


def sort_out(
    source: Source, findings: Iterable[Finding]
) -> tuple[list[Finding], list[Allowed], list[Note]]:
    """Divide the findings of one file.

    Returns:
        Findings that stand, among them those about comments that allow nothing readable; findings
        that are allowed; and a note for each comment that allows nothing.
    """
    permits, left = _permits(source)
    allowed, used = [], set()
    for finding in findings:
        match = next(
            (p for p in permits if p.rule == finding.rule and finding.line in p.lines), None
        )
        if match is None:
            left.append(finding)
        else:
            used.add(match.at)
            allowed.append(Allowed(finding=finding, reason=match.reason))
    notes = [
        Note(
            path=source.path,
            line=permit.at.place.line,
            message=f"allows {permit.rule}, and there is no such finding here",
        )
        for permit in permits
        if permit.at not in used
    ]
    return left, allowed, notes


def _permits(source: Source) -> tuple[list[_Permit], list[Finding]]:
    own_lines = {comment.place.line for comment in source.comments if comment.own_line}
    permits, wrong = [], []
    for comment in source.comments:
        if not is_ours(comment):
            continue
        match = _ALLOW.fullmatch(comment.text)
        rule = match["rule"] if match else ""
        if match is None or rule not in RULES or rule == RULE:
            like = near(rule, RULES) if rule else None
            wrong.append(
                source.finding(
                    RULE,
                    comment.place,
                    f"there is no rule {rule!r}" if rule else "the comment allows nothing",
                    f"write allow {like}" if like else _FORM,
                )
            )
            continue
        permits.append(
            _Permit(
                rule=rule,
                reason=match["reason"],
                lines=_lines(comment, own_lines, len(source.lines)),
                at=comment,
            )
        )
    return permits, wrong


def _lines(comment: Comment, own_lines: set[int], last: int) -> range:
    line = comment.place.line
    if not comment.own_line:
        return range(line, line + 1)
    first = line
    while first - 1 in own_lines:
        first -= 1
    while line + 1 in own_lines:
        line += 1
    return range(first, min(line + 1, last) + 1)

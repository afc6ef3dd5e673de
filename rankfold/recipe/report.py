"""The report of a lint as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rankfold.recipe.finding import Finding, Report, printable


def lines(report: Report) -> Iterator[str]:
    """The report, line by line: findings, what is allowed, what was not judged, and the sum."""
    for finding in report.findings:
        yield _line(finding)
        if finding.suggestion:
            yield f"    try: {printable(finding.suggestion)}"
    for one in report.allowed:
        yield f"allowed  {_line(one.finding)}"
        yield f"    because: {printable(one.reason)}"
    for note in report.notes:
        yield f"note  {printable(note.path)}:{note.line}: {printable(note.message)}"
    yield _sum(report)


def _line(finding: Finding) -> str:
    place = f"{printable(finding.path)}:{finding.line}:{finding.column}"
    return f"{place}: {finding.rule}: {printable(finding.message)}"


def _sum(report: Report) -> str:
    parts = [_count(len(report.findings), "finding")]
    if report.allowed:
        parts.append(f"{len(report.allowed)} allowed")
    if report.notes:
        parts.append(_count(len(report.notes), "note"))
    return f"{_count(len(report.files), 'file')}: {', '.join(parts)}"


def _count(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'s' * (n != 1)}"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "ok": report.ok,
        "files": list(report.files),
        "findings": [finding.to_json() for finding in report.findings],
        "allowed": [one.to_json() for one in report.allowed],
        "notes": [note.to_json() for note in report.notes],
    }

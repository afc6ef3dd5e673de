"""The report of a lint in SARIF 2.1.0, which code review tools show beside the lines.

The format is OASIS's "Static Analysis Results Interchange Format"; what is here is what GitHub's
code scanning needs of it: rules with descriptions, results with places and fingerprints. A finding
that is allowed is a suppressed result, and what was not judged is a notification.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rankfold import __version__
from rankfold.recipe.finding import Finding, Note, Report
from rankfold.recipe.rules import RULES

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(report: Report) -> dict[str, Any]:
    """The report as a SARIF log."""
    results = [_result(finding) for finding in report.findings]
    for one in report.allowed:
        suppression = {"kind": "inSource", "justification": one.reason}
        results.append({**_result(one.finding), "suppressions": [suppression]})
    _tell_apart(results)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [_notification(n) for n in report.notes],
                    }
                ],
                "artifacts": [{"location": {"uri": uri_of(path)}} for path in report.files],
                "results": results,
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "rankfold recipe lint",
        "semanticVersion": __version__,
        "rules": [
            {
                "id": name,
                "shortDescription": {"text": text},
                "fullDescription": {"text": text},
                "help": {"text": f"{text} Allow it with # rankfold: allow {name}: reason"},
                "defaultConfiguration": {"level": "error"},
            }
            for name, text in RULES.items()
        ],
    }


def _result(finding: Finding) -> dict[str, Any]:
    text = finding.message
    if finding.suggestion:
        text += f". Try: {finding.suggestion}"
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": "error",
        "message": {"text": text},
        "locations": [_location(finding.path, finding.line, finding.column)],
        "partialFingerprints": {"rankfold/v1": _fingerprint(finding)},
    }


def _location(path: str, line: int, column: int | None = None) -> dict[str, Any]:
    region = {"startLine": line}
    if column is not None:
        region["startColumn"] = column
    return {"physicalLocation": {"artifactLocation": {"uri": uri_of(path)}, "region": region}}


def _notification(note: Note) -> dict[str, Any]:
    return {
        "level": "note",
        "message": {"text": note.message},
        "locations": [_location(note.path, note.line)],
    }


def _fingerprint(finding: Finding) -> str:
    """The same for the same finding on another line, so that a review is not told of it twice."""
    text = "\0".join((finding.rule, uri_of(finding.path), finding.message))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _tell_apart(results: list[dict[str, Any]]) -> None:
    """Number equal fingerprints of one file, as the format wants them unique within a run."""
    seen: dict[str, int] = {}
    for result in results:
        prints = result["partialFingerprints"]
        base = prints["rankfold/v1"]
        seen[base] = seen.get(base, 0) + 1
        prints["rankfold/v1"] = f"{base}:{seen[base]}"


def uri_of(path: str) -> str:
    """A path as a URI: relative to the working folder if it lies in it, as reviews need it."""
    file = Path(path)
    if file.is_absolute():
        try:
            file = file.relative_to(Path.cwd())
        except ValueError:
            return file.as_uri()
    return quote(file.as_posix(), errors="surrogateescape")

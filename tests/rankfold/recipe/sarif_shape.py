"""The part of the SARIF 2.1.0 schema that the lint's logs use: properties, required ones, values.

The schema allows no other properties in any of these objects, so a misspelt one would make a review
tool refuse the whole log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = dict[str, Any]
"""Property to what it holds: a type, a tuple of values, a shape, or a list of one of them. One that
ends in `!` is required."""

MESSAGE: Shape = {"text!": str}
REGION: Shape = {"startLine!": int, "startColumn": int}
LOCATION: Shape = {
    "physicalLocation": {"artifactLocation!": {"uri!": str}, "region": REGION},
}
RULE: Shape = {
    "id!": str,
    "shortDescription": MESSAGE,
    "fullDescription": MESSAGE,
    "help": MESSAGE,
    "defaultConfiguration": {"level": ("none", "note", "warning", "error")},
}
RESULT: Shape = {
    "ruleId": str,
    "ruleIndex": int,
    "level": ("none", "note", "warning", "error"),
    "message!": MESSAGE,
    "locations": [LOCATION],
    "partialFingerprints": {"rankfold/v1!": str},
    "suppressions": [{"kind!": ("inSource", "external"), "justification": str}],
}
NOTIFICATION: Shape = {
    "level": ("none", "note", "warning", "error"),
    "message!": MESSAGE,
    "locations": [LOCATION],
}
LOG: Shape = {
    "$schema": str,
    "version!": ("2.1.0",),
    "runs!": [
        {
            "tool!": {
                "driver!": {"name!": str, "semanticVersion": str, "rules": [RULE]},
            },
            "columnKind": ("utf16CodeUnits", "unicodeCodePoints"),
            "invocations": [
                {
                    "executionSuccessful!": bool,
                    "toolExecutionNotifications": [NOTIFICATION],
                }
            ],
            "artifacts": [{"location": {"uri": str}}],
            "results": [RESULT],
        }
    ],
}


def faults(value: Any, shape: Any, at: str = "log") -> Iterator[str]:
    """What of a value is not of a shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{at} is no object"
            return
        known = {name.removesuffix("!"): inner for name, inner in shape.items()}
        yield from (f"{at} has {name}" for name in value if name not in known)
        for name in shape:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{at} has no {name[:-1]}"
        for name, inner in value.items():
            if name in known:
                yield from faults(inner, known[name], f"{at}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at} is no array"
            return
        for index, item in enumerate(value):
            yield from faults(item, shape[0], f"{at}[{index}]")
    elif isinstance(shape, tuple):
        if value not in shape:
            yield f"{at} is {value!r}"
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        yield f"{at} is {value!r}"
    elif shape is int and value < (0 if at.endswith("ruleIndex") else 1):
        yield f"{at} is {value}"

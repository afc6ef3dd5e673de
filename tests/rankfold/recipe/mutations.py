"""Every single-field change of a YAML text, made from the text itself.

Each line that holds a scalar gives several mutants: the key misspelt, the line gone, and the value
changed in the ways of its kind. Texts are changed line by line, so that comments and places stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rankfold.recipe.keys import dotted
from rankfold.recipe.loader import parse
from rankfold.recipe.source import Path


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed text."""

    name: str
    """Path and kind, such as `resources.decode_nodes: doubled`."""
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a text whose scalars each stand on the line of their key."""
    source = parse("text", text)
    lines = text.splitlines()
    for path, place in source.values.items():
        value = source.get(path)
        if isinstance(value, dict | list):
            continue
        row, start = place.line - 1, place.column - 1
        key = source.keys[path]
        for kind, new in _values(value):
            line = lines[row][:start] + new + _after(lines[row], start)
            yield _mutant(path, kind, lines, row, line)
        name = str(path[-1])
        if isinstance(path[-1], str) and len(name) > 3 and key.line == place.line:
            at = key.column - 1
            misspelt = name[:-2] + name[-1] if len(name) > 4 else name + "s"
            line = lines[row][:at] + misspelt + lines[row][at + len(name) :]
            yield _mutant(path, "key misspelt", lines, row, line)
        whole = lines[row].strip().startswith((f"{name}:", f'"{name}"'))
        if whole and key.line == place.line:
            gone = lines[:row] + lines[row + 1 :]
            yield Mutant(name=f"{dotted(path)}: removed", text="\n".join(gone) + "\n")


def _mutant(path: Path, kind: str, lines: list[str], row: int, line: str) -> Mutant:
    return Mutant(
        name=f"{dotted(path)}: {kind}",
        text="\n".join([*lines[:row], line, *lines[row + 1 :]]) + "\n",
    )


def _after(line: str, start: int) -> str:
    """What follows a scalar on its line: the end of a flow mapping, or nothing."""
    scalar = re.match(r"\"[^\"]*\"|'[^']*'|[^,}\]#]*", line[start:])
    assert scalar is not None
    return line[start + len(scalar[0]) :]


def _values(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "flipped", str(not value).lower()
        yield "as text", f'"{str(value).lower()}!"'
    elif isinstance(value, int):
        yield "one more", str(value + 1)
        yield "doubled", str(value * 2)
        if value > 1:
            yield "halved", str(value // 2)
        yield "zero", "0"
        yield "negative", str(-value)
        yield "as word", "several"
    elif isinstance(value, float):
        yield "ten times", str(value * 10)
        yield "negative", str(-value)
    elif isinstance(value, str):
        yield "one character less", json.dumps(value[:-1])
        digits = re.search(r"\d+", value)
        if digits:
            more = str(int(digits[0]) + 1).zfill(len(digits[0]))
            yield (
                "number changed",
                json.dumps(value[: digits.start()] + more + value[digits.end() :]),
            )
        yield "as number", "7"
    elif value is None:
        yield "as word", "nixle"

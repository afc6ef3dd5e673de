"""A file as it was read: its text, its values, and where each of them and each comment stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankfold.errors import UsageError
from rankfold.recipe.finding import Finding

Path = tuple[str | int, ...]
"""How to get to a value from the root: keys of mappings and indices of sequences."""


class BadRecipe(UsageError):
    """A file that cannot be read as a recipe: one line with file, line and what is wrong."""


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """A position in a file, both 1-based, columns in characters."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Comment:
    """A comment: the text after its `#`, to the end of the line."""

    place: Place
    """Where its `#` is."""
    text: str
    own_line: bool
    """Whether nothing but blanks stands before it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file.

    Invariant: every value below the root has an entry in `keys` (where its key, or its dash, is)
    and in `values` (where it begins).
    """

    path: str
    """As it was given on the command line, or found by another file."""
    lines: tuple[str, ...]
    data: dict[str, Any]
    keys: dict[Path, Place]
    values: dict[Path, Place]
    comments: tuple[Comment, ...]

    def get(self, path: Path) -> Any:
        """The value at a path, None if there is none."""
        value: Any = self.data
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def place(self, path: Path) -> Place:
        """Where a value begins; if the path has none, where the nearest mapping above it is."""
        while path:
            if path in self.values:
                return self.values[path]
            path = path[:-1]
            if path in self.keys:
                return self.keys[path]
        return Place(line=1, column=1)

    def finding(
        self, rule: str, where: Path | Place, message: str, suggestion: str = ""
    ) -> Finding:
        """A finding in this file."""
        place = where if isinstance(where, Place) else self.place(where)
        return Finding(
            rule=rule,
            path=self.path,
            line=place.line,
            column=place.column,
            message=message,
            suggestion=suggestion,
        )

"""Reads YAML safely, with lines: a loader that refuses what a recipe has no use for.

A recipe is other people's text. Files over 1 MiB, more than 100,000 values (counted as often as
aliases repeat them, so that a few lines cannot stand for millions), nesting deeper than 32, tags,
and aliases that refer to themselves are refused with the line. So are duplicate keys, of which YAML
would silently take the last.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path as FilePath
from typing import Any, NoReturn

import yaml

from rankfold.recipe.finding import printable
from rankfold.recipe.source import BadRecipe, Comment, Path, Place, Source

MAX_BYTES = 1 << 20
"""The largest master configurations in use have about half of it."""
MAX_VALUES = 100_000
MAX_DEPTH = 32
MAX_ALIASES = 256

_BREAKS = re.compile("[\n\x85\u2028\u2029]")
"""What PyYAML takes for the end of a line, once carriage returns are gone."""


def read(path: str) -> Source:
    """Read a file.

    Raises:
        BadRecipe: it cannot be read, is no YAML, or holds what is refused.
    """
    return parse(path, _text(path))


def parse(path: str, text: str) -> Source:
    """Read a recipe's text; `path` is what messages call it.

    Raises:
        BadRecipe: the text is no YAML mapping, or holds what is refused.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        loader = _Loader(path, text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "is no YAML"
        raise _bad(path, mark.line + 1 if mark else 1, what) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _bad(path, line, "has a control character, which YAML does not allow") from None
    if root is None:
        raise _bad(path, 1, "is empty; a recipe is a mapping of keys")
    if not isinstance(root, yaml.MappingNode):
        raise _bad(path, root.start_mark.line + 1, "is no mapping of keys")
    builder = _Builder(path, loader)
    return Source(
        path=path,
        lines=tuple(_BREAKS.split(text)),
        data=builder.build(root, (), 0),
        keys=builder.keys,
        values=builder.values,
        comments=tuple(loader.comments),
    )


def _text(path: str) -> str:
    try:
        file = FilePath(path)
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadRecipe(f"{printable(path)}: is no file")
        if status.st_size > MAX_BYTES:
            raise BadRecipe(f"{printable(path)}: has {status.st_size:,} bytes; 1 MiB at most")
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, BadRecipe):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise BadRecipe(f"{printable(path)}: cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise BadRecipe(f"{printable(path)}: has more than 1 MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(path, content.count(b"\n", 0, error.start) + 1, "is no UTF-8 text") from None


def _bad(path: str, line: int, what: str) -> BadRecipe:
    return BadRecipe(f"{printable(path)}:{line}: {printable(' '.join(what.split()))}")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that keeps comments and refuses tags, depth and floods while it reads."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path
        self.text = text
        self.comments: list[Comment] = []
        self._depth = 0
        self._nodes = 0
        self._aliases = 0

    def scan_to_next_token(self) -> None:
        """Skip blanks and comments, as YAML does, and keep the comments."""
        start, line, column = self.index, self.line, self.column
        super().scan_to_next_token()
        for skipped in _BREAKS.split(self.text[start : self.index]):
            at = skipped.find("#")
            if at >= 0:
                place = Place(line=line + 1, column=column + at + 1)
                own = not self._before(start, column).strip() or column == 0
                self.comments.append(Comment(place=place, text=skipped[at + 1 :], own_line=own))
            start += len(skipped) + 1
            line, column = line + 1, 0

    def _before(self, index: int, column: int) -> str:
        return self.text[index - column : index]

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one node, unless there are too many or it is of a kind that is refused."""
        event = self.peek_event()
        self._nodes += 1
        if self._nodes > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES:,} values")
        if isinstance(event, yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > MAX_ALIASES:
                self._refuse(event, f"more than {MAX_ALIASES} aliases")
        elif event.tag is not None:
            self._refuse(event, f"the tag {event.tag}: a recipe has no tags")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(event, f"nesting deeper than {MAX_DEPTH}")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def _refuse(self, event: Any, what: str) -> NoReturn:
        raise _bad(self.path, event.start_mark.line + 1, what)


class _Builder:
    """Makes plain values of YAML nodes, and notes where each begins."""

    def __init__(self, path: str, loader: _Loader) -> None:
        self.path = path
        self.loader = loader
        self.keys: dict[Path, Place] = {}
        self.values: dict[Path, Place] = {}
        self._built = 0

    def build(self, node: Any, path: Path, depth: int) -> Any:
        self._built += 1
        if self._built > MAX_VALUES:
            self._refuse(node, f"aliases repeat values until there are more than {MAX_VALUES:,}")
        if depth > MAX_DEPTH:
            self._refuse(node, "an alias refers to what it is in")
        if path:
            self.values[path] = _place(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.keys[(*path, index)] = _place(item)
                items.append(self.build(item, (*path, index), depth + 1))
            return items
        return self._scalar(node)

    def _mapping(self, node: Any, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[Any] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            name = self._key(key)
            if name in found:
                first = self.keys[(*path, name)].line
                self._refuse(key, f"the key {name} is there twice, first in line {first}")
            self.keys[(*path, name)] = _place(key)
            found[name] = self.build(value, (*path, name), depth + 1)
        for part in merged:
            if not isinstance(part, yaml.MappingNode):
                self._refuse(part, "<< merges mappings only")
            for key, value in part.value:
                name = self._key(key)
                if name not in found:
                    self.keys[(*path, name)] = _place(key)
                    found[name] = self.build(value, (*path, name), depth + 1)
        return found

    def _key(self, key: Any) -> str:
        if not isinstance(key, yaml.ScalarNode):
            self._refuse(key, "a key is text")
        return str(key.value)

    def _scalar(self, node: Any) -> Any:
        kind = node.tag.rpartition(":")[2]
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return self.loader.construct_yaml_bool(node)
            if kind == "int":
                return self.loader.construct_yaml_int(node)
            if kind == "float":
                return self.loader.construct_yaml_float(node)
        except (ValueError, OverflowError):
            self._refuse(node, f"{node.value[:40]} is no number")
        return node.value

    def _refuse(self, node: Any, what: str) -> NoReturn:
        raise _bad(self.path, node.start_mark.line + 1, what)


def _place(node: Any) -> Place:
    return Place(line=node.start_mark.line + 1, column=node.start_mark.column + 1)

"""Two recipes compared in words: what changed, and what stayed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rankfold.recipe.finding import printable
from rankfold.recipe.keys import dotted
from rankfold.recipe.lint import kind_of
from rankfold.recipe.source import BadRecipe, Path, Source
from rankfold.recipe.view import SIZES, Recipe, Side, read_recipe

_BARE = re.compile(r"[-+.\d]*|true|false|null|~", re.IGNORECASE)
"""Texts that are something else without their quotes."""
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field that differs. `before` or `after` is None where it is not written."""

    path: Path
    before: Any
    after: Any
    line_before: int | None
    line_after: int | None

    def to_json(self) -> dict[str, Any]:
        """The change as plain data."""
        return {
            "path": dotted(self.path),
            "before": self.before,
            "after": self.after,
            "line_before": self.line_before,
            "line_after": self.line_after,
        }


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What is different between two files."""

    words: tuple[str, ...]
    """Sentences about sides that changed."""
    changes: tuple[Change, ...]
    """Every field that differs."""
    told: frozenset[Path]
    """Fields of `changes` that the sentences tell."""
    stayed: tuple[str, ...]
    """Sentences about what is the same."""

    def to_json(self) -> dict[str, Any]:
        """The difference as plain data."""
        return {
            "same": not self.changes,
            "words": list(self.words),
            "changes": [change.to_json() for change in self.changes],
            "stayed": list(self.stayed),
        }


def compare(before: Source, after: Source) -> Difference:
    """Compare two recipes, or two master configurations.

    Raises:
        BadRecipe: one is neither, or they are not of the same kind.
    """
    kinds = kind_of(before), kind_of(after)
    if kinds[0] != kinds[1]:
        raise BadRecipe(f"{before.path} is a {kinds[0]}, and {after.path} is a {kinds[1]}")
    old, new = dict(_leaves(before.data)), dict(_leaves(after.data))
    changes = tuple(
        Change(
            path=path,
            before=old.get(path),
            after=new.get(path),
            line_before=before.place(path).line if path in old else None,
            line_after=after.place(path).line if path in new else None,
        )
        for path in dict.fromkeys([*old, *new])
        if path not in old or path not in new or not _same(old[path], new[path])
    )
    words: list[str] = []
    stayed: list[str] = []
    told: set[Path] = set()
    if kinds[0] == "recipe":
        a, b = read_recipe(before)[0], read_recipe(after)[0]
        for name in ("prefill", "decode", "agg"):
            _tell(name, a, b, words, stayed, told)
        _tell_load(a, b, stayed)
    shared = sum(path in new and _same(value, new[path]) for path, value in old.items())
    stayed.append(f"{shared} field{'s' * (shared != 1)} of {len(old)} are the same")
    return Difference(
        words=tuple(words), changes=changes, told=frozenset(told), stayed=tuple(stayed)
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every scalar and every list of scalars, with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    """Equal and of one type (true is not 1); NaN is itself."""
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


def _tell(
    name: str, a: Recipe, b: Recipe, words: list[str], stayed: list[str], told: set[Path]
) -> None:
    old, new = a.side(name), b.side(name)
    if any(s is None and _unread(r, name) for r, s in ((a, old), (b, new))):
        return
    if old is None and new is None:
        return
    fields: set[Path] = {("resources", f"{name}_workers"), ("resources", f"gpus_per_{name}")}
    for side in (old, new):
        if side is not None and side.degrees is not None:
            switch = "enable-expert-parallel"
            sizes = [s for size in (*SIZES, switch) for s in (size, size.replace("-", "_"))]
            fields |= {(*side.flags_at, size) for size in sizes}
    if old is None or new is None:
        side = old or new
        assert side is not None
        verb = f"{'is' if side.workers == 1 else 'are'} {'removed' if old else 'new'}"
        words.append(f"{name}: {_workers(side)} of {_gpus(side)} {verb}")
        told |= fields
        return
    if (old.workers, old.gpus, old.degrees) != (new.workers, new.gpus, new.degrees):
        verb = "becomes" if old.workers == 1 else "become"
        words.append(
            f"{name}: {_workers(old)} of {_gpus(old)} {verb} {_number(new.workers)} of "
            f"{new.gpus}{_word(new)}"
        )
        told |= fields
        totals = [side.workers * side.gpus for side in (old, new)]
        if totals[0] == totals[1]:
            stayed.append(f"{name}: {totals[0]} GPUs in all{_on(old, new)}")
        else:
            words.append(f"{name}: {totals[0]} GPUs in all become {totals[1]}")
    else:
        stayed.append(f"{name}: {_workers(old)} of {_gpus(old)}{_on(old, new)}")
    if old.nodes != new.nodes and old.nodes is not None and new.nodes is not None:
        words.append(f"{name}: {old.nodes} nodes become {new.nodes}")
        told.add(("resources", f"{name}_nodes"))


def _unread(recipe: Recipe, name: str) -> bool:
    """Whether a side is written, and could not be read: then nothing can be said of it."""
    written = recipe.source.get(("resources", f"{name}_workers"))
    return written is not None and written != 0


def _tell_load(a: Recipe, b: Recipe, stayed: list[str]) -> None:
    one, other = a.model.benchmark, b.model.benchmark
    if one and other and one == other and one.isl and one.osl:
        points = ", ".join(map(str, a.concurrencies)) or "unknown"
        stayed.append(f"load: {one.isl} tokens in, {one.osl} out, concurrency {points}")


def _number(n: int) -> str:
    return _WORDS[n] if n < len(_WORDS) else str(n)


def _workers(side: Side) -> str:
    return f"{_number(side.workers)} worker{'s' * (side.workers != 1)}"


def _gpus(side: Side) -> str:
    return f"{side.gpus} GPU{'s' * (side.gpus != 1)}{_word(side)}"


def _word(side: Side) -> str:
    return f" ({side.degrees.word})" if side.degrees else ""


def _on(old: Side, new: Side) -> str:
    if old.nodes is None or old.nodes != new.nodes:
        return ""
    return f" on {old.nodes} node{'s' * (old.nodes != 1)}" if old.nodes else " on shared nodes"


def lines(before: Source, after: Source, difference: Difference) -> Iterator[str]:
    """The difference, line by line."""
    yield f"{printable(before.path)} -> {printable(after.path)}"
    if not difference.changes:
        yield "no field differs"
    for text in difference.words:
        yield printable(text)
    for change in difference.changes:
        if change.path in difference.told:
            continue
        name = printable(dotted(change.path))
        if change.line_before is None:
            yield f"{name}: {_shown(change.after)} is new (line {change.line_after})"
        elif change.line_after is None:
            yield f"{name}: {_shown(change.before)} is removed"
        else:
            yield (
                f"{name}: {_shown(change.before)} becomes {_shown(change.after)} "
                f"(line {change.line_after})"
            )
    for text in difference.stayed:
        yield f"stays  {printable(text)}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return printable(f"[{', '.join(_shown(item) for item in value[:20])}]")
    if isinstance(value, str) and _BARE.fullmatch(value):
        return f'"{value}"'
    return printable(str(value)[:200] if isinstance(value, str) else repr(value)[:40])

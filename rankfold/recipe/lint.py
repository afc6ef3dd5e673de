"""Lints files: reads each as what it is, runs the rules, and follows entries to their recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from rankfold.recipe.allow import sort_out
from rankfold.recipe.files import find_recipe
from rankfold.recipe.finding import Finding, Note, Report
from rankfold.recipe.loader import read
from rankfold.recipe.master import MasterEntry, Point, is_master, read_master
from rankfold.recipe.rules import (
    arithmetic,
    engine_flags,
    entries,
    handover,
    load,
    name,
    parallel,
    setup,
    stale_comment,
    versions,
)
from rankfold.recipe.source import BadRecipe, Source
from rankfold.recipe.view import Recipe, is_recipe, read_recipe

CHECKS = (
    arithmetic.check,
    parallel.check,
    name.check,
    stale_comment.check_recipe,
    load.check,
    engine_flags.check,
    handover.check,
    versions.check,
    setup.check,
)
"""What is asked of each recipe."""


def lint(paths: Sequence[str], recipes: Path | None = None) -> Report:
    """Lint recipes and master configurations.

    Args:
        recipes: the folder that entries call `recipes`, where it is not above them.

    Raises:
        BadRecipe: a file cannot be read as either.
    """
    unique = list(dict.fromkeys(paths))
    shelf = _Shelf([read(path) for path in unique], recipes)
    findings: list[Finding] = []
    notes: list[Note] = []
    allowed = []
    for source in shelf.sources:
        found: list[Finding] = []
        for one in shelf.judge(source):
            if isinstance(one, Note):
                notes.append(one)
            else:
                found.append(one)
        standing, permitted, unused = sort_out(source, found)
        findings += standing
        allowed += permitted
        notes += unused
    return Report(
        files=tuple(unique),
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.order)),
        allowed=tuple(sorted(allowed, key=lambda one: one.finding.order)),
        notes=tuple(dict.fromkeys(notes)),
    )


def kind_of(source: Source) -> str:
    """What a file is: recipe or master.

    Raises:
        BadRecipe: it is neither.
    """
    if is_recipe(source):
        return "recipe"
    if is_master(source):
        return "master"
    raise BadRecipe(
        f"{source.path}:1: is neither a recipe (model, resources, backend) nor a master "
        "configuration (entries with framework and scenarios)"
    )


class _Shelf:
    """The files of one run: those to be judged, and recipes that these name, read once each."""

    def __init__(self, sources: list[Source], root: Path | None) -> None:
        self.sources = sources
        self.root = root
        self._recipes: dict[Path, tuple[Recipe, list[Finding]]] = {}
        for source in sources:
            if kind_of(source) == "recipe":
                self._recipes[Path(source.path).resolve()] = read_recipe(source)

    def judge(self, source: Source) -> Iterator[Finding | Note]:
        """Everything there is to say about one file."""
        if kind_of(source) == "master":
            yield from self._master(source)
            return
        recipe, findings = self._recipes[Path(source.path).resolve()]
        yield from findings
        for check in CHECKS:
            yield from check(recipe)

    def _master(self, source: Source) -> Iterator[Finding | Note]:
        found, findings = read_master(source)
        yield from findings
        points: list[tuple[Point, Recipe | None]] = []
        for entry in found:
            recipes: list[Recipe] = []
            for point in entry.points:
                named: list[Recipe] = []
                for at, config_file in point.config_files:
                    for one in self._named(entry, at, config_file):
                        if isinstance(one, Recipe):
                            named.append(one)
                        else:
                            yield one
                for recipe in named:
                    yield from entries.check_point(entry, point, recipe)
                recipes += [recipe for recipe in named if recipe not in recipes]
                points.append((point, named[0] if named else None))
            yield from entries.check_entry(entry, recipes)
            yield from versions.check_entry(entry, recipes)
        yield from stale_comment.check_master(source, points)

    def _named(
        self, entry: MasterEntry, at: tuple[str | int, ...], config_file: str
    ) -> Iterable[Recipe | Finding | Note]:
        given = self._given(config_file)
        if given is not None:
            return [given]
        found = find_recipe(entry.source.path, config_file, self.root)
        if found.path is None and found.judged:
            return [entries.missing(entry, at, config_file, found.nearest)]
        if found.path is None:
            line = entry.source.place(at).line
            message = f"{config_file} is not here, so the entry was not compared with it"
            return [Note(path=entry.source.path, line=line, message=message)]
        try:
            return [self._read(found.path)]
        except BadRecipe as error:
            message = f"{entry.key}: the recipe cannot be read: {error}"
            return [entry.source.finding(entries.CONFIG_FILE, at, message, "put it right")]

    def _given(self, config_file: str) -> Recipe | None:
        """The recipe among the given files whose path ends as the CONFIG_FILE does."""
        parts = PurePosixPath(config_file).parts
        parts = parts[1:] if parts[:1] == ("recipes",) else parts
        if len(parts) < 2:
            return None
        fits = [path for path in self._recipes if path.parts[-len(parts) :] == parts]
        return self._recipes[fits[0]][0] if len(fits) == 1 else None

    def _read(self, path: Path) -> Recipe:
        path = path.resolve()
        if path not in self._recipes:
            source = read(_shown(path))
            if not is_recipe(source):
                raise BadRecipe(f"{source.path}:1: is no recipe")
            self._recipes[path] = read_recipe(source)
        return self._recipes[path][0]


def _shown(path: Path) -> str:
    """A path as people would write it from here."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)

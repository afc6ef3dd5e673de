"""Values against a schema: unknown keys, wrong types, and the model of what is left."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rankfold.recipe.finding import Finding
from rankfold.recipe.source import Path, Source

M = TypeVar("M", bound=BaseModel)

NEAR = 0.75
"""From this likeness on (difflib's ratio) a name is taken for a misspelling of another.

`decode_worker` and `decode_workers` have 0.96, `isl` and `osl` 0.67.
"""


def near(name: str, known: Iterable[str], likeness: float = NEAR) -> str | None:
    """The known name that this one nearly is, or None."""
    found = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def fit(
    source: Source, at: Path, model: type[M], *, strict: bool = True
) -> tuple[M, list[Finding], frozenset[Path]]:
    """Read the mapping at a path as a model.

    Args:
        strict: whether every unknown key is a finding, or only one that is nearly a known one.

    Returns:
        The model of what fits; findings for what does not; and the paths that were left out.
    """
    data = source.get(at)
    findings: list[Finding] = []
    dropped: set[Path] = set()
    while True:
        try:
            fitted = model.model_validate(_without(data, at, dropped))
            break
        except ValidationError as error:
            before = len(dropped)
            for problem in error.errors():
                path = _real(source, at, problem["loc"])
                if path not in dropped and path != at:
                    dropped.add(path)
                    findings.append(_finding(source, path, problem, model, at))
            if len(dropped) == before:  # The root itself: nothing of it can be read.
                fitted = model.model_construct()
                break
    if not strict:
        findings += _misspelt(source, at, fitted)
    return fitted, findings, frozenset(dropped)


def _without(data: Any, at: Path, dropped: set[Path]) -> Any:
    """A copy of the data without what was dropped."""
    if at in dropped:
        return None
    if isinstance(data, dict):
        return {
            key: _without(value, (*at, key), dropped)
            for key, value in data.items()
            if (*at, key) not in dropped
        }
    if isinstance(data, list):
        return [
            _without(value, (*at, index), dropped)
            for index, value in enumerate(data)
            if (*at, index) not in dropped
        ]
    return data


def _real(source: Source, at: Path, loc: tuple[str | int, ...]) -> Path:
    """The part of pydantic's location that is in the file: it also names members of unions."""
    path = at
    for step in loc:
        if (*path, step) in source.values:
            path = (*path, step)
    return path


def _finding(source: Source, path: Path, problem: Any, model: type[BaseModel], at: Path) -> Finding:
    name = str(path[-1])
    if problem["type"] == "extra_forbidden":
        known = _known(model, path[len(at) : -1])
        like = near(name, known)
        return source.finding(
            "unknown-key",
            source.keys[path],
            f"{dotted(path[:-1]) or 'a recipe'} has no key {name!r}",
            f"write {like}" if like else f"remove it; there are {', '.join(sorted(known)[:12])}",
        )
    value = source.get(path)
    return source.finding(
        "wrong-type", path, f"{dotted(path)} is {_shown(value)}", _wanted(problem, value)
    )


def _wanted(problem: Any, value: Any) -> str:
    kind = str(problem["type"])
    limits = problem.get("ctx") or {}
    if "greater_than_equal" in kind:
        return f"write {limits.get('ge')} or more"
    if "less_than_equal" in kind:
        return f"write {limits.get('le')} or less"
    wanted = {
        "string_type": "text",
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping of keys",
        "model_type": "a mapping of keys",
        "model_attributes_type": "a mapping of keys",
    }.get(kind, "a value of another type")
    if wanted == "a whole number" and isinstance(value, str) and value.strip().isdecimal():
        return f"write {value.strip()} without quotes"
    if wanted == "text" and isinstance(value, int | float):
        return f'write "{value}", in quotes'
    return f"write {wanted}"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, int) and abs(value) >= 10**12:
        return "a number of more than 12 digits"
    return str(value).lower() if isinstance(value, bool) else str(value)


def dotted(path: Path) -> str:
    """A path as people write it: backend.vllm_config.decode."""
    return "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in path).removeprefix(".")


def _known(model: type[BaseModel], path: Path) -> set[str]:
    """The keys that a schema has at a path below its root."""
    for step in path:
        field = next(
            (f for n, f in model.model_fields.items() if step in (n, f.alias)),
            None,
        )
        inner = next(_models(field.annotation), None) if field else None
        if inner is None:
            return set()
        model = inner
    return {field.alias or name for name, field in model.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _misspelt(source: Source, at: Path, fitted: BaseModel) -> Iterator[Finding]:
    """Findings for the extra keys, here and below, that are nearly known ones."""
    known = {field.alias or name for name, field in type(fitted).model_fields.items()}
    present = source.get(at) or {}
    for name in fitted.model_extra or {}:
        like = near(name, known - set(present), 0.85)
        if like:
            yield source.finding(
                "unknown-key",
                source.keys[(*at, name)],
                f"{dotted(at)} has the key {name!r}, which is nearly {like}",
                f"write {like}",
            )
    for name, field in type(fitted).model_fields.items():
        value = getattr(fitted, name)
        below = (*at, field.alias or name)
        if isinstance(value, BaseModel):
            yield from _misspelt(source, below, value)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _misspelt(source, (*below, index), item)

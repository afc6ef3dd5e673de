"""A master configuration as the rules see it: entries and the points of their sweeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rankfold.recipe.finding import Finding
from rankfold.recipe.keys import fit
from rankfold.recipe.master_schema import REQUIRED, Entry, Scenario, Version, Workers
from rankfold.recipe.source import Path, Source
from rankfold.recipe.words import Degrees

_CONFIG_FILE = re.compile(
    r"\s*CONFIG_FILE=(?P<path>.*?\.ya?ml(?=:|\s*$)|.*?)(?::.*)?\s*", re.DOTALL
)
"""The setting, without a suffix that picks a variant of the recipe."""


@dataclass(frozen=True, kw_only=True)
class MasterSide:
    """One side of a point: its workers and their degrees."""

    at: Path
    workers: int
    degrees: Degrees | None
    """None where `tp`, `ep` and `dp-attn` do not say, or say what no worker can be."""
    data_parallel: bool


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a sweep, of a disaggregated entry."""

    at: Path
    isl: int | None
    osl: int | None
    scenario_at: Path
    concurrencies: tuple[int, ...]
    sides: dict[str, MasterSide]
    config_files: tuple[tuple[Path, str], ...]
    """The recipes that it names, each with where."""


@dataclass(frozen=True, kw_only=True)
class MasterEntry:
    """One entry."""

    source: Source
    key: str
    model: Entry
    points: tuple[Point, ...]

    @property
    def at(self) -> Path:
        """Where it is."""
        return (self.key,)

    @property
    def router(self) -> Version | None:
        """The router, where it is written with its parts."""
        return self.model.router if isinstance(self.model.router, Version) else None


def is_master(source: Source) -> bool:
    """Whether a file is meant to be a master configuration: a mapping of entries."""
    marks = {"framework", "scenarios", "model-prefix", "runner", "seq-len-configs"}
    return any(isinstance(v, dict) and len(marks & set(v)) >= 2 for v in source.data.values())


def read_master(source: Source) -> tuple[list[MasterEntry], list[Finding]]:
    """Read all entries; what does not fit the schema is told and left out."""
    entries: list[MasterEntry] = []
    findings: list[Finding] = []
    for key, value in source.data.items():
        if not isinstance(value, dict):
            findings.append(
                source.finding(
                    "wrong-type", (key,), f"{key} is no entry", "write a mapping of keys"
                )
            )
            continue
        model, found, _ = fit(source, (key,), Entry, strict=False)
        findings += found
        if model.multinode or model.disagg:
            findings += [
                source.finding(
                    "missing-key", source.keys[(key,)], f"{key}.{name} is missing", f"write {name}"
                )
                for name in REQUIRED
                if value.get(name) is None
            ]
        points = []
        for at, scenario, more in _scenarios(source, key, model):
            findings += more
            points += list(_points(at, scenario))
            findings += [
                source.finding("missing-key", at, f"{key}: the scenario has no {name}", "write it")
                for name in ("isl", "osl")
                if (source.get(at) or {}).get(name) is None
            ]
        entries.append(MasterEntry(source=source, key=key, model=model, points=tuple(points)))
    return entries, findings


def _scenarios(
    source: Source, key: str, model: Entry
) -> Iterator[tuple[Path, Scenario, list[Finding]]]:
    written = (model.scenarios or {}).get("fixed-seq-len")
    for index, value in enumerate(written if isinstance(written, list) else []):
        at = (key, "scenarios", "fixed-seq-len", index)
        if isinstance(value, dict):
            scenario, found, _ = fit(source, at, Scenario, strict=False)
            yield at, scenario, found


def _points(scenario_at: Path, scenario: Scenario) -> Iterator[Point]:
    for index, written in enumerate(scenario.search_space or []):
        at = (*scenario_at, "search-space", index)
        sides, files = {}, []
        for name in ("prefill", "decode"):
            side: Workers | None = getattr(written, name)
            if side is None:
                continue
            for n, setting in enumerate(side.additional_settings or []):
                match = _CONFIG_FILE.fullmatch(setting)
                if match:
                    files.append(((*at, name, "additional-settings", n), match["path"]))
            if side.num_worker:
                sides[name] = MasterSide(
                    at=(*at, name),
                    workers=side.num_worker,
                    degrees=_degrees(side),
                    data_parallel=side.dp_attn is True,
                )
        yield Point(
            at=at,
            isl=scenario.isl,
            osl=scenario.osl,
            scenario_at=scenario_at,
            concurrencies=tuple(written.conc_list or ()),
            sides=sides,
            config_files=tuple(files),
        )


def _degrees(side: Workers) -> Degrees | None:
    """DEP16 is written tp: 16, ep: 16, dp-attn: true, and in older entries tp: 1."""
    tp, ep, pp = side.tp or 1, side.ep or 1, side.pp or 1
    if side.dp_attn:
        if tp not in (1, ep):
            return None
        return Degrees(dp=ep, pp=pp, ep=True) if ep > 1 else Degrees(dp=tp, pp=pp)
    if ep not in (1, tp):
        return None
    return Degrees(tp=tp, pp=pp, ep=ep > 1)

"""What a hunt found, as data and on the terminal. The JSON keys are kept stable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rankfold.hunt.search import Failure
from rankfold.hunt.tally import Tally
from rankfold.known import KNOWN

SHOWN = 12
"""Most values of a dimension that are shown."""


@dataclass(frozen=True, kw_only=True)
class HuntReport:
    """A whole hunt."""

    tally: Tally
    seconds: float
    """Of the search, without vLLM's import."""
    workers: int
    seed: int
    never: Mapping[str, list[str]] = field(default_factory=dict)
    """The values of each dimension that were never drawn."""
    failure: Failure | None = None
    replay: Path | None = None
    """The failure's file."""
    cases: int | None = None
    """Cases of the scope, where the hunt was exhaustive."""
    done: int | None = None
    """Of these the ones done, now or before."""

    @property
    def ok(self) -> bool:
        """Whether no example failed."""
        return self.failure is None

    @property
    def rate(self) -> float:
        """Examples a second, of all workers together."""
        return self.tally.examples / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        data: dict[str, Any] = {
            "ok": self.ok,
            "examples": self.tally.examples,
            "examples_per_second": round(self.rate, 1),
            "drawn": {
                name: dict(sorted(counts.items(), key=_numeric))
                for name, counts in self.tally.drawn.items()
            },
            "failure": None,
            "never_drawn": dict(self.never),
            "classes": len(self.tally.classes),
            "known": dict(self.tally.known),
            "seconds": round(self.seconds, 3),
            "workers": self.workers,
            "seed": self.seed,
        }
        if self.cases is not None:
            data |= {"cases": self.cases, "done": self.done}
        if self.failure is not None:
            example, verdict = self.failure.example, self.failure.verdict
            data["failure"] = {
                "verdict": f"{verdict.what} ({verdict.where}): {verdict.why}",
                "topology": example.topology,
                "tokens": example.tokens,
                "replay": str(self.replay),
                "check": verdict.name,
                "kind": verdict.kind,
                "at": verdict.at,
                "example": example.to_json(),
                "found_after": round(self.failure.found_after, 3),
                "tried": self.failure.tried,
            }
        return data


def render(report: HuntReport, console: Console) -> None:
    """Print what was drawn, and the failure if there is one."""
    for name, counts in report.tally.drawn.items():
        pairs = sorted(counts.items(), key=_numeric)
        shown = [f"{value or 'none'} {count}" for value, count in pairs]
        console.print(Text(f"drawn  {name}: {_first(shown)}"))
    for name, values in report.never.items():
        listed = [value or "none" for value in values]
        console.print(Text(f"never  {name}: {_first(listed)}", "yellow"))
    for known in KNOWN:
        if count := report.tally.known.get(known.name):
            text = f"known  {known.name}: {count} examples show it. {known.what} ({known.show})"
            console.print(Text(text, "yellow"))
    if report.cases is not None:
        left = report.cases - (report.done or 0)
        console.print(f"cases  {report.done:,} of {report.cases:,} done, {left:,} left")
    if report.failure is not None:
        _render_failure(report.failure, report.replay, console)
    how = f"{report.tally.examples:,} examples in {len(report.tally.classes)} classes"
    pace = f"{report.rate:.0f} examples a second on {report.workers} " + (
        "worker" if report.workers == 1 else "workers"
    )
    end = "no failure" if report.ok else "1 failure"
    style = "bold green" if report.ok else "bold red"
    console.print(
        Text(f"{end}: {how}, {pace}, seed {report.seed}  ({report.seconds:.1f} s)", style)
    )


def _render_failure(failure: Failure, replay: Path | None, console: Console) -> None:
    verdict = failure.verdict
    console.print(Text("FAILS ", "bold red"), Text(f"{verdict.name}: {verdict.what}"))
    console.print(Text(f"       where: {verdict.where}"))
    console.print(Text(f"       why:   {verdict.why}"))
    console.print(Text(f"       shown by: {failure.example}"))
    found = f"found after {failure.found_after:.1f} s and {failure.tried} examples"
    console.print(Text(f"       {found}; again: rankfold replay {replay}"))


def _first(values: list[str]) -> str:
    """The first ones in a line, and how many more there are."""
    more = f", and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
    return ", ".join(values[:SHOWN]) + more


def _numeric(item: tuple[str, int]) -> tuple[bool, int, str]:
    """Numbers by their size, before words."""
    text = item[0]
    return (not text.isdecimal(), int(text) if text.isdecimal() else 0, text)

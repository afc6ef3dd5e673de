"""The matrix as data, on the terminal, and as a page of the docs. The JSON keys are kept stable."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from properties.faults import FAULTS, letter
from rankfold.faults.matrix import Cleared, Matrix
from rankfold.faults.trial import Trial


def to_json(matrix: Matrix) -> dict[str, Any]:
    """As plain data."""
    return {
        "ok": matrix.ok,
        "transport": matrix.transport,
        "not_run": [{"name": fault.name, "why": why} for fault, why in matrix.not_run],
        "faults": [_fault(trial) for trial in matrix.trials],
        "controls": [
            {
                "name": cleared.control.name,
                "flagged": cleared.flagged,
                "report": cleared.control.report,
                "noted": cleared.noted,
                "waste": round(cleared.waste, 3),
            }
            for cleared in matrix.controls
        ],
        "caught": matrix.share(lambda trial: trial.caught),
        "right_class": matrix.share(lambda trial: trial.right_class),
        "right_place": matrix.share(lambda trial: trial.right_place),
        "right": matrix.share(_right),
        "median_seconds": round(matrix.median_seconds, 3),
        "seconds": round(matrix.seconds, 3),
        "first_catcher": first_catchers(matrix),
    }


def first_catchers(matrix: Matrix) -> dict[str, int]:
    """For each check, of how many faults it gives the headline."""
    counts: dict[str, int] = {}
    for trial in matrix.trials:
        if trial.by:
            counts[trial.by[0]] = counts.get(trial.by[0], 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _right(trial: Trial) -> bool:
    return trial.right_class and trial.right_place


def _fault(trial: Trial) -> dict[str, Any]:
    fault, verdict = trial.fault, trial.verdict
    said = "" if verdict is None else f"{verdict.what} ({verdict.where}): {verdict.why}"
    return {
        "name": fault.name,
        "class": letter(fault),
        "report": fault.report,
        "mechanism": fault.mechanism,
        "caught": trial.caught,
        "by": [*trial.by],
        "verdict": said,
        "kind": "" if verdict is None else verdict.kind,
        "at": "" if verdict is None else verdict.at,
        "right_class": trial.right_class,
        "right_place": trial.right_place,
        "smallest": {"topology": trial.topology, "tokens": trial.tokens},
        "seconds": round(trial.seconds, 3),
    }


def render(matrix: Matrix, console: Console) -> None:
    """Print the matrix for a person."""
    for trial in matrix.trials:
        fault, verdict = trial.fault, trial.verdict
        name = f" {letter(fault)} {fault.name}: "
        if verdict is None:
            console.print(Text("MISSED", "bold red"), Text(f"{name}on {', '.join(trial.missed)}"))
            continue
        wrong = [
            what
            for what, right in (("class", trial.right_class), ("place", trial.right_place))
            if not right
        ]
        mark = Text(f"wrong {' and '.join(wrong)}", "bold red") if wrong else Text("caught")
        said = (
            f"{name}{verdict.kind} at {verdict.at or 'no place'}, by {', '.join(trial.by)}; "
            f"{trial.topology}, {_tokens(trial.tokens)}; {trial.seconds:.2f} s"
        )
        console.print(mark, Text(said))
    for fault, why in matrix.not_run:
        console.print(Text(f"not run {letter(fault)} {fault.name}: {why}"))
    for cleared in matrix.controls:
        console.print(Text(_control(cleared), "bold red" if cleared.flagged else ""))
    for line in summary(matrix):
        console.print(Text(line, "bold green" if matrix.ok else "bold red"))


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _control(cleared: Cleared) -> str:
    said = "FLAGGED" if cleared.flagged else "clear"
    noted = f"; noted: {cleared.noted}" if cleared.noted else ""
    waste = f"; moves {cleared.waste:.2f} x what is needed" if cleared.waste > 1 else ""
    return f"control {cleared.control.name} ({cleared.control.report}): {said}{noted}{waste}"


def summary(matrix: Matrix) -> list[str]:
    """The figures, in lines."""
    count = len(matrix.trials)
    caught = sum(trial.caught for trial in matrix.trials)
    right = sum(map(_right, matrix.trials))
    firsts = ", ".join(f"{name} {n}" for name, n in first_catchers(matrix).items())
    return [
        f"{caught} of {count} faults caught, {right} with the right class and place, "
        f"{sum(c.flagged for c in matrix.controls)} of {len(matrix.controls)} controls flagged",
        f"median time to detect {matrix.median_seconds:.2f} s; the matrix took "
        f"{matrix.seconds:.0f} s",
        f"first to catch: {firsts}",
        *(
            [f"over {matrix.transport}: {len(matrix.not_run)} faults not run"]
            if matrix.transport != "folded"
            else []
        ),
    ]


def to_markdown(matrix: Matrix, date: str, versions: str) -> str:
    """The page of the docs.

    Args:
        matrix: a full run.
        date: of the run.
        versions: of what ran.
    """
    lines = [
        "# The kill matrix",
        "",
        f"Made by `rankfold faults --markdown FILE` on {date}, with {versions}.",
        "",
        *(f"- {line}" for line in summary(matrix)),
        "",
        "Each row is a known bug, switched on in the running code. *Caught by* names the checks "
        "that fail, the headline's first; *smallest* is the smallest case found that fails in the "
        "same way. A class or place that is not the right one is marked with (!).",
        "",
        "| fault | class | report | mechanism | caught by | kind | at | smallest | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for trial in matrix.trials:
        fault, verdict = trial.fault, trial.verdict
        kind, at = "", ""
        if verdict is not None:
            kind = verdict.kind + ("" if trial.right_class else " (!)")
            at = verdict.at + ("" if trial.right_place else " (!)")
        cells = (
            fault.name,
            letter(fault),
            fault.report,
            fault.mechanism,
            ", ".join(trial.by) or "**missed**",
            kind,
            at,
            f"{trial.topology}, {trial.tokens}",
            f"{trial.seconds:.2f}",
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    vague = [trial for trial in matrix.trials if not _right(trial)]
    if vague:
        lines += ["", "## Not named rightly", ""]
        lines += [f"- {t.fault.name}: {t.fault.limits or 'no reason known'}" for t in vague]
    lines += ["", "## Negative controls", "", *(f"- {_control(c)}" for c in matrix.controls), ""]
    return "\n".join(lines)


def listing() -> list[dict[str, Any]]:
    """Every fault of the library, without running it."""
    return [
        {
            "name": fault.name,
            "class": letter(fault),
            "report": fault.report,
            "mechanism": fault.mechanism,
            "shows": [*fault.shows],
            "hides": [*fault.hides],
        }
        for fault in FAULTS.values()
    ]

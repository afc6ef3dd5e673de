"""A good recipe and its entry, and helpers that change one thing of them and lint the result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rankfold.recipe.finding import Report
from rankfold.recipe.lint import lint

EXAMPLES = Path(__file__).parents[3] / "examples" / "recipes"
BELOW = "minimax-m3/gb300-fp8/8k1k"
NAME = "3p1d-dep2-dep16-8k1k.yaml"
OLD_NAME = "3p2d-dep2-dep8-8k1k.yaml"
GOOD = (EXAMPLES / "corrected/recipes" / BELOW / NAME).read_text()
MASTER = (EXAMPLES / "corrected/master.yaml").read_text()

Edit = tuple[str, str]
"""A text that is there exactly once, and what it becomes."""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with each edit made.

    Raises:
        ValueError: what an edit replaces is not there exactly once.
    """
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    return text


def lint_text(tmp_path: Path, text: str, name: str = NAME) -> Report:
    """Lint one recipe."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return lint([str(path)])


def lint_edits(tmp_path: Path, *edits: Edit, name: str = NAME) -> Report:
    """Lint the good recipe with edits."""
    return lint_text(tmp_path, edited(GOOD, edits), name)


def lint_both(
    tmp_path: Path, recipe: Iterable[Edit] = (), master: Iterable[Edit] = (), *, name: str = NAME
) -> Report:
    """Lint the good entry and its recipe, each with edits, in the places they have."""
    return lint_pair(tmp_path, edited(GOOD, recipe), edited(MASTER, master), name=name)


def lint_pair(tmp_path: Path, recipe: str, master: str, *, name: str = NAME) -> Report:
    """Lint an entry and its recipe in the places they have."""
    folder = tmp_path / "recipes" / BELOW
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(recipe)
    (tmp_path / "master.yaml").write_text(master)
    return lint([str(tmp_path / "master.yaml"), str(folder / name)])


def rules(report: Report) -> list[str]:
    """The rules of the findings."""
    return [finding.rule for finding in report.findings]

"""docs/recipes.md and the README: what they show is what is printed, and every rule is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankfold.cli import main
from rankfold.recipe import loader
from rankfold.recipe.rules import RULES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/recipes.md").read_text()
README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"^\$ rankfold (recipe .*)\n((?:.+\n)+?)```", PAGE + README, re.MULTILINE)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[c[:40] for c, _ in SHOWN])
def test_a_shown_command_prints_what_is_shown(
    command: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of three dots stand for lines that are left out."""
    monkeypatch.chdir(ROOT)
    main(command.split())
    printed = capsys.readouterr().out
    if "\n...\n" in f"\n{output}":
        for line in output.splitlines():
            assert line == "..." or line in printed.splitlines()
    else:
        assert printed == output


def test_the_page_shows_commands() -> None:
    assert {command.split()[1] for command, _ in SHOWN} == {"lint", "diff", "run"}


def test_the_page_has_every_rule() -> None:
    table = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z-]+)`", table)) >= set(RULES)


def test_the_page_has_the_limits() -> None:
    text = " ".join(PAGE.split())
    assert f"more than {loader.MAX_VALUES:,} values" in text
    assert f"nesting deeper than {loader.MAX_DEPTH}" in text
    assert f"more than {loader.MAX_ALIASES} aliases" in text
    assert loader.MAX_BYTES == 1 << 20
    assert "Files over 1 MiB" in text

"""The example recipes: good ones have no finding, bad ones have what their comments expect."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rankfold.recipe.lint import lint
from rankfold.recipe.rules import RULES
from tests.rankfold.recipe.recipes import EXAMPLES

GOOD = sorted((EXAMPLES / "good").rglob("*.yaml"))
BAD = sorted((EXAMPLES / "bad").rglob("*.yaml"))


def expected(path: Path) -> Counter[tuple[int, str]]:
    """(line, rule) of each `# expect: RULE, RULE` in a file."""
    found: Counter[tuple[int, str]] = Counter()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.search(r"# expect: (.*)$", line)
        for rule in match[1].split(", ") if match else ():
            assert rule in RULES, f"{path.name}:{number}: no rule {rule}"
            found[number, rule] += 1
    return found


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_recipe_has_no_finding_and_no_note(path: Path) -> None:
    report = lint([str(path)])
    assert not report.findings
    assert not report.notes


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_file_has_exactly_what_its_comments_expect(path: Path) -> None:
    report = lint([str(path)])
    found = Counter((finding.line, finding.rule) for finding in report.findings)
    assert found == expected(path)


def test_the_bad_files_show_every_rule() -> None:
    shown = {rule for path in BAD for _, rule in expected(path)}
    assert shown == set(RULES)

"""The deployment change of seed 2: the stale comment and the version mismatch, and nothing else."""

from __future__ import annotations

import pytest

from rankfold.recipe.lint import lint
from tests.rankfold.recipe.recipes import BELOW, EXAMPLES, NAME, OLD_NAME


def files(which: str) -> list[str]:
    """The entry and the recipe of one example folder."""
    name = OLD_NAME if which == "before" else NAME
    return [str(EXAMPLES / which / "master.yaml"), str(EXAMPLES / which / "recipes" / BELOW / name)]


def test_after_the_change_a_comment_is_stale_and_a_version_is_old() -> None:
    report = lint(files("after"))
    version, comment = report.findings
    assert (version.rule, comment.rule) == ("version", "stale-comment")
    assert comment.path.endswith(NAME)
    assert comment.line == 3
    assert "2D DEP8" in (EXAMPLES / "after/recipes" / BELOW / NAME).read_text().splitlines()[2]
    assert comment.suggestion == (
        "# 3P DEP2 prefill (TP1 DP2 EP, 2 GPU/worker) + 1D DEP16 decode (TP1 DP16 EP, "
        "16 GPU/worker = 4 nodes each)."
    )
    assert version.path.endswith("master.yaml")
    assert "router" in (EXAMPLES / "after/master.yaml").read_text().splitlines()[version.line - 1]
    assert "1.3.0.dev20260614" in version.message
    assert version.suggestion == 'write version: "1.3.0.dev20260710"'
    assert not report.allowed
    assert not report.notes


def test_the_suggested_comment_is_the_corrected_one() -> None:
    _, comment = lint(files("after")).findings
    corrected = (EXAMPLES / "corrected/recipes" / BELOW / NAME).read_text().splitlines()
    assert corrected[2] == comment.suggestion


def test_the_corrected_files_have_nothing() -> None:
    report = lint(files("corrected"))
    assert report.ok
    assert not report.allowed
    assert not report.notes


def test_before_the_change_the_engine_patch_is_allowed_with_its_reason() -> None:
    report = lint(files("before"))
    assert report.ok
    (allowed,) = report.allowed
    assert allowed.finding.rule == "engine-patch"
    assert allowed.reason == "until the image ships both fixes"
    assert not report.notes


def test_all_examples_together_find_the_same() -> None:
    """Entries of each folder find their own recipe, though two folders have files of one name."""
    together = [path for which in ("before", "after", "corrected") for path in files(which)]
    assert [f.rule for f in lint(together).findings] == ["version", "stale-comment"]


@pytest.mark.parametrize("which", ["before", "after", "corrected"])
def test_the_entry_alone_finds_its_recipe(which: str) -> None:
    """Versions are compared also if only the entry is given; the recipe itself is not judged."""
    found = [finding.rule for finding in lint(files(which)[:1]).findings]
    assert found == (["version"] if which == "after" else [])

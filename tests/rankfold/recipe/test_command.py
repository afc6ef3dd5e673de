"""The command line: exit codes, text, JSON and SARIF; allowed findings are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from rankfold.recipe.rules import RULES
from tests.rankfold.recipe.recipes import BELOW, EXAMPLES, GOOD, NAME, OLD_NAME, edited
from tests.rankfold.recipe.sarif_shape import LOG, faults

BEFORE = [str(EXAMPLES / "before/master.yaml"), str(EXAMPLES / "before/recipes" / BELOW / OLD_NAME)]
AFTER = [str(EXAMPLES / "after/master.yaml"), str(EXAMPLES / "after/recipes" / BELOW / NAME)]
CORRECTED = [
    str(EXAMPLES / "corrected/master.yaml"),
    str(EXAMPLES / "corrected/recipes" / BELOW / NAME),
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run `rankfold recipe ...`: the exit code and what is printed."""
    code = main(["recipe", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_text_says_where_what_and_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "lint", *AFTER)
    assert code == 1
    shown = out.splitlines()
    assert shown[0].startswith(f"{AFTER[0]}:9:43: version: ")
    assert shown[1].startswith("    try: write version: ")
    assert shown[2].startswith(f"{AFTER[1]}:3:48: stale-comment: the comment says decode 2 workers")
    assert shown[3].startswith("    try: # 3P DEP2 prefill (TP1 DP2 EP, 2 GPU/worker) + 1D DEP16")
    assert shown[4:] == ["2 files: 2 findings"]


def test_nothing_found_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "lint", *CORRECTED) == (0, "2 files: no findings\n")


def test_an_allowed_finding_is_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "lint", *BEFORE)
    assert code == 0
    assert out.splitlines()[0].startswith(f"allowed  {BEFORE[1]}:17:15: engine-patch: ")
    assert out.splitlines()[1:] == [
        "    because: until the image ships both fixes",
        "2 files: no findings, 1 allowed",
    ]


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "lint", *AFTER, *BEFORE, "--json")
    found = json.loads(out)
    assert code == 1
    assert set(found) == {"ok", "files", "findings", "allowed", "notes"}
    assert found["ok"] is False
    assert found["files"] == [*AFTER, *BEFORE]
    assert [one["rule"] for one in found["findings"]] == ["version", "stale-comment"]
    keys = {"rule", "path", "line", "column", "message", "suggestion"}
    assert all(set(one) == keys for one in found["findings"])
    assert found["allowed"][0]["reason"] == "until the image ships both fixes"


def sarif(capsys: pytest.CaptureFixture[str], *paths: str) -> dict[str, Any]:
    """The SARIF log of a lint."""
    _, out = run(capsys, "lint", *paths, "--sarif")
    log: dict[str, Any] = json.loads(out)
    return log


def test_sarif_has_what_code_review_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """The properties that SARIF 2.1.0 requires, and those that GitHub's code scanning reads."""
    log = sarif(capsys, *AFTER, *BEFORE)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (only,) = log["runs"]
    driver = only["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert ids == list(RULES)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    assert len(only["results"]) == 3
    fingerprints = set()
    for result in only["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["message"]["text"]
        assert result["level"] == "error"
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert ":" not in physical["artifactLocation"]["uri"].partition("file:")[0]
        assert physical["region"]["startLine"] >= 1
        assert physical["region"]["startColumn"] >= 1
        fingerprints.add(result["partialFingerprints"]["rankfold/v1"])
    assert len(fingerprints) == 3
    suppressed = [result for result in only["results"] if "suppressions" in result]
    (one,) = suppressed
    assert one["ruleId"] == "engine-patch"
    assert one["suppressions"] == [
        {"kind": "inSource", "justification": "until the image ships both fixes"}
    ]
    assert only["invocations"][0]["executionSuccessful"] is True


def test_sarif_has_the_shape_of_the_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "r.yaml"
    noted.write_text(edited(GOOD, [("\nhealth_check:", "\nsetup_script: x.sh\nhealth_check:")]))
    log = sarif(capsys, *AFTER, *BEFORE, str(noted), *map(str, (EXAMPLES / "bad").rglob("*.yaml")))
    assert list(faults(log, LOG)) == []
    assert len(log["runs"][0]["results"]) > 20
    # And the shape refuses what the schema refuses.
    run = log["runs"][0]
    for wrong in (
        {**log, "version": "2.0.0"},
        {**log, "runs": [{**run, "columnkind": "unicodeCodePoints"}]},
        {**log, "runs": [{**run, "results": [{"ruleId": "nodes"}]}]},
        {**log, "runs": [{**run, "tool": {"driver": {"rules": []}}}]},
    ):
        assert list(faults(wrong, LOG))


def test_sarif_paths_are_relative_to_the_working_folder_and_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = edited(GOOD, [("decode_nodes: 4", "decode_nodes: 5")])
    (tmp_path / "my recipe#1.yaml").write_text(text)
    for given in ("my recipe#1.yaml", str(tmp_path / "my recipe#1.yaml")):
        (only,) = sarif(capsys, given)["runs"]
        location = only["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
        assert location == {"uri": "my%20recipe%231.yaml"}


def test_a_fingerprint_stays_when_lines_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    prints = []
    for above in ("", "\n\n\n"):
        path.write_text(above + edited(GOOD, [("isl: 8192", "isl: 9000")]))
        results = sarif(capsys, str(path))["runs"][0]["results"]
        assert len(results) >= 2
        prints.append(sorted(result["partialFingerprints"]["rankfold/v1"] for result in results))
    assert prints[0] == prints[1]


def test_what_was_not_judged_is_a_notification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(edited(GOOD, [("\nhealth_check:", "\nsetup_script: x.sh\nhealth_check:")]))
    (only,) = sarif(capsys, str(path))["runs"]
    (note,) = only["invocations"][0]["toolExecutionNotifications"]
    assert "x.sh is not here" in note["message"]["text"]
    code, out = run(capsys, "lint", str(path))
    assert code == 0
    assert out.splitlines()[-1] == "1 file: no findings, 1 note"


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("# rankfold: allow nodes", "write # rankfold: allow RULE: reason"),
        ("# rankfold: allow nodes:", "write # rankfold: allow RULE: reason"),
        ("# rankfold: allow node: it is meant", "write allow nodes"),
        ("# rankfold: allow everything: it is meant", "write # rankfold: allow RULE: reason"),
        ("# rankfold: allow allow: it is meant", "write"),
        ("# Rankfold : ignore", "write # rankfold: allow RULE: reason"),
    ],
)
def test_a_comment_that_allows_nothing_readable_is_a_finding(
    tmp_path: Path, comment: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(edited(GOOD, [("decode_nodes: 4", f"decode_nodes: 5  {comment}")]))
    code, out = run(capsys, "lint", str(path))
    assert code == 1
    assert ": allow: " in out
    assert says in out


@pytest.mark.parametrize(
    ("edit", "allowed"),
    [
        (("  decode_nodes: 4", "  decode_nodes: 5  # rankfold: allow nodes: a spare"), True),
        (("  decode_nodes: 4", "  # rankfold: allow nodes: a spare\n  decode_nodes: 5"), True),
        (("  decode_nodes: 4", "  # rankfold: allow nodes: a spare\n\n  decode_nodes: 5"), False),
        (("  decode_nodes: 4", "  # rankfold: allow limits: a spare\n  decode_nodes: 5"), False),
        (("  gpus_per_node: 4\n  prefill_nodes: 2\n  decode_nodes: 4",
          "  gpus_per_node: 4  # rankfold: allow nodes: a spare\n  prefill_nodes: 2\n"
          "  decode_nodes: 5"), False),
    ],
)  # fmt: skip
def test_a_comment_allows_its_rule_at_its_line_and_nothing_else(
    tmp_path: Path, edit: tuple[str, str], allowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    text = edited(GOOD, [edit]).replace("Nodes: 2 prefill + 4 decode.", "")
    path.write_text(text)
    code, out = run(capsys, "lint", str(path))
    assert code == (0 if allowed else 1)
    assert ("allowed  " in out) is allowed
    assert ("there is no such finding here" in out) is not allowed


def test_a_stale_comment_can_be_allowed_where_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    text = (EXAMPLES / "after/recipes" / BELOW / NAME).read_text()
    path.write_text(text.replace("# A tray", "# rankfold: allow stale-comment: kept\n# A tray"))
    assert run(capsys, "lint", str(path))[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipe"],
        ["recipe", "lint"],
        ["recipe", "lint", "--json", "--sarif", "x"],
        ["recipe", "diff", "x"],
        ["recipe", "run", "x"],
        ["recipe", "lint", "x", "--recipes", "no-such-folder"],
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_neither_torch_nor_vllm_is_imported() -> None:
    script = (
        "import sys; from rankfold.cli import main; "
        "code = main(['recipe', 'lint', *sys.argv[1:]]); "
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *CORRECTED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

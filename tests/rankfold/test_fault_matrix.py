"""`rankfold faults`: the matrix in a reduced form, its report, and its page in the docs.

That every fault of the library is named rightly, and hides where it has to, is tested with the
faults themselves (tests/properties/faults).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model.subject import prepare
from properties.faults import CLASSES, FAULTS, letter
from properties.faults.controls import CONTROLS
from rankfold.cli import main
from rankfold.examiner import References
from rankfold.faults.report import first_catchers, to_json
from rankfold.faults.trial import try_fault

DOCS = Path(__file__).parents[2] / "docs" / "faults.md"

FIRST = {
    # check: a fault that it is the first to catch
    "parameters": "two-experts-swapped",
    "sequence parallelism": "sp-at-one-stage-only",
    "aliasing": "experts-write-over-their-input",
    "poison": "padding-survives-its-mask",
    "oracle": "moe-reduced-by-model-again",
    "routing": "router-bias-left-out",
    "run": "entry-leaves-residual-whole",
    "ledger": "rank-skips-the-barrier",
    "delivery": "send-buffer-reused",
    "replication": "ranks-sum-in-their-own-order",
    "stage transfer": "stage-sends-narrowed",
    "metamorphic": "one-scale-for-the-batch",
    "sanitizer": "untapped-output-reduced-twice",
    "hand-over": "handover-last-page-left",
    "requests": "handover-released-when-sent",
}


@pytest.fixture(scope="module")
def references() -> References:
    prepare()
    return References()


@pytest.mark.parametrize("check", FIRST)
def test_every_check_is_the_first_to_catch_some_fault(check: str, references: References) -> None:
    trial = try_fault(FAULTS[FIRST[check]], references)
    assert trial.by[0] == check
    assert trial.right_class and trial.right_place
    assert trial.seconds < 60


def test_the_library_is_as_large_as_it_says() -> None:
    assert len(FAULTS) >= 100
    assert {letter(fault) for fault in FAULTS.values()} == {*CLASSES} == {*"ABCDEFGHIJK"}
    for fault in FAULTS.values():
        assert fault.mechanism and fault.report and fault.shows and fault.kinds and fault.at
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.name)


def test_the_report_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["dp-scatter-does-not-reduce", "dp-gathers-cross"]
    assert main(["faults", *names, "--json", "--workers", "1"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in found["faults"]] == names
    for fault in found["faults"]:
        keys = {"name", "report", "caught", "by", "verdict", "right_class", "right_place"}
        assert keys | {"smallest", "seconds"} <= fault.keys()
        assert fault["smallest"].keys() == {"topology", "tokens"}
        assert fault["caught"] is True
    assert found["controls"] == []


def test_a_person_reads_a_line_for_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "dp-gathers-cross", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "caught  G dp-gathers-cross: mismatch at all_gather" in out
    assert "1 of 1 faults caught" in out


def test_the_list_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["name"] for fault in listed] == [*FAULTS]
    assert main(["faults", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["dp-gather-cross"], "did you mean dp-gathers-cross"), (["--workers", "0"], "--workers")],
)
def test_bad_usage_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["faults", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.strip().splitlines()) == 1


def test_a_fault_that_nothing_catches_is_shown_as_missed(references: References) -> None:
    from contextlib import nullcontext
    from dataclasses import replace

    from rankfold.faults.matrix import Matrix

    harmless = replace(FAULTS["dense-mlp-all-reduces"], apply=nullcontext, shows=("tp1", "tp2"))
    harmless = replace(harmless, needs=())
    trial = try_fault(harmless, references)
    assert not trial.caught and trial.missed == ("tp1", "tp2") and trial.by == ()
    matrix = Matrix(trials=[trial], controls=[], seconds=1.0)
    assert not matrix.ok and first_catchers(matrix) == {}
    assert to_json(matrix)["faults"][0]["caught"] is False


def test_the_page_in_the_docs_has_every_fault_and_control() -> None:
    text = DOCS.read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([A-K]) \|", text, re.MULTILINE)
    assert rows == [(name, letter(fault)) for name, fault in FAULTS.items()]
    assert re.search(r"on \d{4}-\d\d-\d\d, with vllm \S+, torch \S+", text)
    for control in CONTROLS:
        assert f"control {control.name}" in text

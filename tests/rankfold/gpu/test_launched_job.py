"""The job for real, over gloo in place of NCCL: the same code but for the transport."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from rankfold.gpu import inventory
from rankfold.gpu.plan import PLAIN, SP_OFF, SP_ON
from tests.rankfold.gpu.test_job import NO_GPU

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever this runs, it is about gloo."""
    monkeypatch.setattr(inventory, "look", lambda: NO_GPU)


def job(
    folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    code = main(["gpu", "--device", "cpu", *arguments, "--out", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def agrees(rows: dict[str, dict[str, str]], name: str) -> None:
    """The rows of a variant pass: its own checks, and its agreement with folded ranks."""
    for what in ("checks", "outputs", "ledger"):
        row = rows[f"{name}: {what}"]
        assert row["verdict"] == "PASS", row


def test_two_and_four_ranks_agree_with_folded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And two stages equal one, bit for bit."""
    code, found = job(tmp_path, capsys, "--topology", "tp2pp2", "--topology", "tp2", "--no-timing")
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 0, [row for row in rows.values() if row["verdict"] == "FAIL"]
    for word in ("tp2", "tp2pp2"):
        agrees(rows, f"{word} over gloo on the CPU, {PLAIN}")
        assert rows[f"{word} over NCCL"]["reason"] == "the CPU was asked for"
    row = rows[f"tp2pp2 over gloo on the CPU, {PLAIN}: equals tp2"]
    assert row["verdict"] == "PASS"
    assert row["reason"] == "logprobs of 9 tokens: largest difference 0"
    assert [(ran["topology"], ran["exit_code"]) for ran in found["launches"]] == [
        ("tp2", 0),
        ("tp2pp2", 0),
    ]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["report.json", "report.txt", "tp2.log", "tp2pp2.log"]


def test_sequence_parallelism_on_and_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = job(tmp_path, capsys, "--topology", "tep2")
    rows = {row["name"]: row for row in found["rows"]}
    assert code == 0, [row for row in rows.values() if row["verdict"] == "FAIL"]
    for variant in (PLAIN, SP_ON, SP_OFF):
        agrees(rows, f"tep2 over gloo on the CPU, {variant}")
    row = rows["tep2 over gloo on the CPU: step time, SP on and off"]
    assert (row["verdict"], row["reason"].count(" ms")) == ("PASS", 2)


def test_a_launch_that_gives_nothing_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here: one that is not done in time."""
    code, found = job(tmp_path, capsys, "--topology", "tp2", "--limit", "0.5")
    assert code == 3
    [row] = [row for row in found["rows"] if row["verdict"] == "FAIL"]
    assert (row["name"], row["reason"]) == ("tp2 over gloo on the CPU", "not done after 0.5 s")

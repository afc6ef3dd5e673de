"""On GPUs: the job over NCCL, and with ranks that share a GPU. Skipped where GPUs are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from tests.sim.launched.launch import torchrun

pytestmark = pytest.mark.slow


def job(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the rows of `rankfold gpu` on these topologies."""
    asked = [part for word in words for part in ("--topology", word)]
    code = main(["gpu", *asked, "--out", str(folder), "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return code, rows


def held(rows: list[dict[str, Any]], name: str) -> list[str]:
    """What passed of a launch; fails if anything of it did not."""
    own = [row for row in rows if row["name"].startswith(f"{name}, ")]
    assert own, [row["name"] for row in rows]
    assert [row for row in own if row["verdict"] == "FAIL"] == []
    return [row["name"] for row in own if row["verdict"] == "PASS"]


@pytest.mark.gpu(count=1)
def test_one_gpu_agrees_with_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = job(tmp_path, capsys, "tp1")
    assert code == 0, rows
    assert len(held(rows, "tp1 over NCCL")) == 3


@pytest.mark.gpu(count=1)
def test_a_worker_checks_on_the_gpu() -> None:
    ended = torchrun(1, "rankfold", "worker", "check", "tp1", "--device", "cuda", "--json")
    assert ended.returncode == 0, ended.stdout
    assert '"transport": "nccl"' in ended.stdout


@pytest.mark.gpu(count=2)
def test_two_gpus_agree_with_folded_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("tp1", "tp2", "pp2", "tep2")
    code, rows = job(tmp_path, capsys, *words)
    assert code == 0, rows
    for word in words[1:]:
        variants = 3 if word == "tep2" else 1
        assert len(held(rows, f"{word} over NCCL")) == 3 * variants + (word == "pp2")


@pytest.mark.gpu(count=4)
def test_four_gpus_agree_with_folded_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = job(tmp_path, capsys, "tp2", "tep2", "tp2pp2", "tep2pp2", "tp4", "tep4")
    assert code == 0, rows
    assert "tep2pp2 over NCCL, MegaMoE, SP on: equals tep2" in held(rows, "tep2pp2 over NCCL")

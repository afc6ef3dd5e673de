"""`rankfold worker` under torchrun, over gloo: the report of folded ranks, and bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rankfold.cli import main
from rankfold.errors import UsageError
from rankfold.worker import Place
from sim.launched import Launch, LaunchError
from tests.sim.launched.launch import torchrun

LAUNCH = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def json_of(text: str) -> dict[str, Any]:
    """The report among what all processes printed."""
    start = text.index("\n{\n") if not text.startswith("{\n") else 0
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text[start:].lstrip())[0]
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_the_report_is_that_of_folded_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["check", "tp2", "--attention", "dense", "--json"]
    ended = torchrun(2, "rankfold", "worker", *asked)
    assert ended.returncode == 0, ended.stdout
    launched = json_of(ended.stdout)
    assert main(asked) == 0
    folded = json.loads(capsys.readouterr().out)
    assert launched["ok"]
    assert launched["ledger"] == folded["ledger"]
    # At TP 2 a sum has one order, so that the values are equal as well.
    assert launched["taps"] == folded["taps"]
    checks = [{c["name"]: c["what"] for c in report["checks"]} for report in (launched, folded)]
    assert checks[0] == {name: what for name, what in checks[1].items() if name != "sanitizer"}


@pytest.mark.gloo
@pytest.mark.slow
def test_another_number_of_ranks_is_one_line() -> None:
    ended = torchrun(2, "rankfold", "worker", "check", "tep2pp2")
    assert ended.returncode == 1
    own = [line for line in ended.stdout.splitlines() if line.startswith("rankfold worker")]
    assert own == [
        "rankfold worker: tep2pp2 has 4 ranks, and torchrun has started 2: use --nproc-per-node 4 "
        "on one machine"
    ]


def test_without_a_launcher_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    assert main(["worker", "check", "tp2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "RANK, WORLD_SIZE" in line
    assert "torchrun --nproc-per-node" in line


def test_the_environment_of_a_rank_on_the_first_of_two_machines() -> None:
    launch = Launch.of(LAUNCH)
    assert (launch.rank, launch.world_size, launch.host) == (1, 4, "node0")
    assert not launch.one_machine
    assert Launch.of({**LAUNCH, "WORLD_SIZE": "2"}).one_machine


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_RANK": "2"}, "on its machine 2 of 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "rank 1 of 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ],
)
def test_an_environment_that_makes_no_sense(change: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        Launch.of({**LAUNCH, **change})


@pytest.mark.parametrize(
    ("asked", "gpus", "device", "transport"),
    [
        ("auto", 0, "cpu", "gloo"),
        ("cpu", 2, "cpu", "gloo"),
        ("auto", 2, "cuda:1", "nccl"),
        ("auto", 1, "cuda:0", "gloo-gpu"),
        ("cuda", 4, "cuda:1", "nccl"),
    ],
)
def test_a_rank_has_a_gpu_for_itself_or_shares_one(
    asked: str, gpus: int, device: str, transport: str
) -> None:
    place = Place.of(Launch.of(LAUNCH), asked, gpus)
    assert (place.device, place.transport) == (torch.device(device), transport)


@pytest.mark.parametrize(("asked", "says"), [("cuda", "no CUDA GPU"), ("tpu", "auto, cpu, cuda")])
def test_a_device_that_is_not_there(asked: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Place.of(Launch.of(LAUNCH), asked, 0)


@pytest.mark.parametrize("transport", ["nccl", "gloo-gpu"])
def test_what_only_a_launcher_has_is_not_to_be_asked_for(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "tp2", "--transport", transport]) == 2
    err = capsys.readouterr().err
    assert "start the ranks with torchrun" in err and len(err.strip().splitlines()) == 1

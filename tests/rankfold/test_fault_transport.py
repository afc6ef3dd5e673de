"""`rankfold faults --transport gloo`: what rank processes can show is caught there too."""

from __future__ import annotations

import json

import pytest

from properties.faults import find
from rankfold.cli import main
from rankfold.faults.trial import unfit


@pytest.mark.gloo
@pytest.mark.slow
def test_faults_are_caught_over_gloo_or_it_is_said_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [
        "attention-reduced-twice",
        "rank-skips-a-reduction",
        "untapped-output-reduced-twice",
        "send-buffer-reused",
    ]
    assert main(["faults", *names, "--transport", "gloo", "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transport"] == "gloo"
    caught, hung = found["faults"]
    assert (caught["caught"], caught["by"][0]) == (True, "oracle")
    assert (hung["caught"], hung["by"][0]) == (True, "ledger")
    assert found["caught"] == 1.0
    assert found["not_run"] == [
        {
            "name": "untapped-output-reduced-twice",
            "why": "its stand-in program runs on folded ranks",
        },
        {"name": "send-buffer-reused", "why": "only folded ranks can be made to deliver late"},
    ]


def test_what_processes_cannot_show() -> None:
    assert unfit(find("dp-scatter-does-not-reduce")) == "its stand-in program runs on folded ranks"
    assert unfit(find("attention-reduced-twice")) == ""


def test_an_unknown_transport_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "attention-reduced-twice", "--transport", "pigeon"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "folded, gloo" in line

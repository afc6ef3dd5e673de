"""`rankfold recipe run`, and `rankfold check` of several workers: exit codes, one line, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from properties.faults import FAULTS
from rankfold.cli import main

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
OF_CHECK = {
    "ok", "topology", "ranks", "tokens", "seed", "transport", "subject", "checks", "taps",
    "against", "ledger", "seconds",
}  # fmt: skip
SMALL = ["--requests", "4", "--decode", "2", "--layers", "dm", "--json"]


def test_a_recipe_against_another(capsys: pytest.CaptureFixture[str]) -> None:
    pair = "recipes/minimax-m3/gb300-fp8/8k1k"
    after = str(RECIPES / "corrected" / pair / "3p1d-dep2-dep16-8k1k.yaml")
    before = str(RECIPES / "before" / pair / "3p2d-dep2-dep8-8k1k.yaml")
    assert main(["recipe", "run", after, "--against", before, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= OF_CHECK | {"recipe", "fleets", "hand_overs", "requests", "notes"}
    assert (found["ok"], found["topology"], found["ranks"]) == (True, "3p1d-dep2-dep16", 22)
    assert found["recipe"] == after and found["against"]["topology"] == "3p2d-dep2-dep8"
    assert found["against"]["same_tokens"] is True
    assert found["fleets"]["prefill"]["workers"] == 3
    assert found["hand_overs"]["whole"] == 4


def test_a_person_reads_what_was_served(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipe", "run", "1p1d-tp1-tp2", "--calm", *SMALL[:-1]]
    assert main([*arguments, "--against", "tp1"]) == 0
    out = capsys.readouterr().out
    assert "1 prefill" in out and "1 decode" in out
    assert "4 whole, 0 given up and begun again" in out
    assert "against tp1: the same tokens" in out and "1p1d-tp1-tp2 holds" in out


def test_requests_on_dp_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dep2", *SMALL, "--chunk", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= OF_CHECK and found["topology"] == "dep2"
    assert found["hand_overs"] is None
    assert [len(request["tokens"]) for request in found["requests"]] == [3] * 4


def test_as_many_requests_as_there_is_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "dep2", "--decode", "1", "--layers", "dm", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["requests"]) == 4


def test_a_fault_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with FAULTS["handover-last-page-left"].apply():
        assert main(["check", "1p1d-tp1-tp2", *SMALL[:-1]]) == 1
    out = capsys.readouterr().out
    assert "1p1d-tp1-tp2 fails: request" in out and "did not arrive" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipe", "run", "banana"], "'banana' is no topology"),
        (["recipe", "run", "1p1d-tp3-tp1"], "query heads do not divide by 3"),
        (["recipe", "run", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["recipe", "run", "tp1", "--against", "1p-tp1"], "use a word such as 3p1d-dep2-dep16"),
        (["recipe", "run", "tp1", "--requests", "0"], "--requests 0: use 1 to"),
        (["recipe", "run", "tp1", "--decode", "99"], "--decode 99: use 0 to"),
        (["recipe", "run", "tp1", "--attention", "flash"], "use dense, sparse, model"),
        (["recipe", "run", "1p1d-tp2-tep2", "--moe-backend", "deep_gemm_mega_moe"], "needs expert"),
        (["check", "dep2", "--decode", "1", "--tokens", "5"], "--tokens: requests on several"),
        (["check", "dep2", "--chunk", "2", "--aux", "1"], "--aux: requests on several"),
        (["check", "1p1d-tp1-tp1", "--requests", "999"], "--requests 999"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.strip().splitlines()) == 1

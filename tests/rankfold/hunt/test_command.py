"""`rankfold hunt` as people call it: budgets, workers, reports, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from rankfold.hunt.workers import Link, WorkerDied, run_workers


def hunt(*arguments: str, directory: Path) -> tuple[int, dict[str, Any], str]:
    """`rankfold hunt --json` in a new process, in a directory of its own."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "rankfold", "hunt", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.slow
def test_right_code_holds_on_two_workers(tmp_path: Path) -> None:
    code, found, err = hunt(
        "--topology", "tep2pp2", "--examples", "60", "--workers", "2", directory=tmp_path
    )
    assert code == 0, err
    assert {"ok", "examples", "examples_per_second", "drawn", "failure"} <= found.keys()
    assert found["ok"] is True and found["failure"] is None
    assert 60 <= found["examples"] <= 62
    assert found["examples_per_second"] > 0
    assert found["drawn"]["topology"] == {"tep2pp2": found["examples"]}
    assert all(sum(counts.values()) == found["examples"] for counts in found["drawn"].values())
    assert "tokens" in found["never_drawn"] or len(found["drawn"]["tokens"]) == 18
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_failure_has_a_replay_file_that_reproduces_it(tmp_path: Path) -> None:
    fault = ("--fault", "dense-mlp-all-reduces")
    code, found, err = hunt(*fault, "--seconds", "60", "--workers", "2", directory=tmp_path)
    assert code == 1, err
    failure = found["failure"]
    assert found["ok"] is False
    assert (failure["topology"], failure["tokens"]) == ("tep2pp2", 1)
    assert "layers.0.ffn" in failure["verdict"]
    path = tmp_path / failure["replay"]
    assert path.is_file() and path.parent.name == ".rankfold"
    assert main(["replay", str(path), "--json"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology", "zz9"], "zz9"),
        (["--topology", "tp3"], "do not divide"),
        (["--topology", "dp2", "--exhaustive"], "no data parallelism"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--examples", "0"], "--examples"),
        (["--workers", "0"], "--workers"),
        (["--seed", "-1"], "--seed"),
        (["--fault", "dense-mlp"], "did you mean"),
        (["--exhaustive", "--fault", "dense-mlp-all-reduces"], "use one of them"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hunt", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1


def numbers(link: Link, number: int) -> None:
    for i in range(3):
        link.send((number, i))


def test_workers_hand_over_what_they_say_in_order() -> None:
    heard: list[tuple[int, int]] = []
    run_workers(3, numbers, heard.append)
    assert sorted(heard) == [(number, i) for number in range(3) for i in range(3)]
    assert [i for number, i in heard if number == 1] == [0, 1, 2]


def test_a_worker_that_dies_is_named() -> None:
    def killed(link: Link, number: int) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"worker 1 ended with exit code -9"):
        run_workers(2, killed, lambda message: None)

    def raises(link: Link, number: int) -> None:
        raise KeyError("lost")

    with pytest.raises(WorkerDied, match=r"(?s)worker \d: .*KeyError: 'lost'"):
        run_workers(2, raises, lambda message: None)


def test_workers_end_when_they_are_told_to() -> None:
    def forever(link: Link, number: int) -> None:
        link.send(number)
        while not link.stopped():
            time.sleep(0.01)

    heard: list[int] = []
    started = time.monotonic()
    run_workers(2, forever, heard.append, stop=lambda: len(heard) == 2)
    assert sorted(heard) == [0, 1] and time.monotonic() - started < 20


@pytest.mark.slow
def test_ctrl_c_ends_a_hunt_and_its_workers(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "rankfold", "hunt", "--seconds", "300", "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        children: list[str] = []
        deadline = time.monotonic() + 120
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
            listed = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
            )
            children = listed.stdout.split()
        assert len(children) >= 2
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    for child in children:
        assert not Path(f"/proc/{child}/cmdline").exists() or not (
            Path(f"/proc/{child}/cmdline").read_bytes()
        )

"""`--transport gloo` as people call it: verdicts, kills, hangs, Ctrl-C, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankfold.cli import main
from rankfold.rig import Stand
from sim.gloo import GlooWorld
from tests.sim.gloo.leftovers import alive, gone, shared_memory

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

CACHE = str(Path(tempfile.gettempdir()) / "torchinductor")
"""torch's own cache, which it makes when it is imported."""


def children(pid: int) -> list[int]:
    """Process ids of all descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc to find a command's processes"
)


@contextmanager
def started(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command on its own, with a temporary folder of its own; ended with the block."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": CACHE}
    command = subprocess.Popen(
        [sys.executable, "-m", "rankfold.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.wait()


def ranks_of(command: subprocess.Popen[str], count: int, seconds: float = 90.0) -> list[int]:
    """Its zygote and ranks, once so many ranks are there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and command.poll() is None:
        found = children(command.pid)
        if len(found) > count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {count} ranks: {command.communicate()}")


def test_check_holds_over_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tep2pp2", "--transport", "gloo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transport"] == "gloo"
    assert found["ok"]
    assert found["ledger"]["by_op"]["all_reduce"]["count"] == 9
    assert "sanitizer" not in {check["name"] for check in found["checks"]}


def test_an_unknown_transport_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["check", "tp2"], ["hunt", "--seconds", "1"]):
        assert main([*command, "--transport", "pigeon"]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert "folded, gloo" in line


def test_a_killed_rank_is_exit_code_3_with_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pids: list[int] = []
    step = Stand.step

    def killed_meanwhile(self: Stand, *args: Any) -> Any:
        assert isinstance(self.world, GlooWorld)
        pids.extend(self.world.pids)
        threading.Timer(0.02, os.kill, [pids[1], signal.SIGKILL]).start()
        return step(self, *args)

    monkeypatch.setattr(Stand, "step", killed_meanwhile)
    # Tokens enough that the kill meets it in the middle.
    code = main(["check", "tp2", "--transport", "gloo", "--tokens", "300", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 3
    assert found["broke"]["kind"] == "rank_died"
    assert "rank 1 was ended by SIGKILL" in found["broke"]["headline"]
    assert [rank["rank"] for rank in found["broke"]["ranks"]] == [0, 1]
    assert gone(pids)


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    memory = shared_memory()
    with started(tmp_path, "check", "tp2", "--transport", "gloo", "--tokens", "2000") as command:
        everyone = ranks_of(command, 2)
        os.kill(command.pid, how)
        _, err = command.communicate(timeout=30)
    if how == signal.SIGINT:
        assert command.returncode == 130
        assert err.strip().splitlines()[-1] == "rankfold: interrupted"
    assert gone(everyone)
    assert not any(map(alive, everyone))
    assert shared_memory() <= memory
    assert list(tmp_path.iterdir()) == []

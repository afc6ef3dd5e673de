"""Starts torchrun on a plan, and reads the record that rank 0 has written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rankfold.gpu.plan import Plan
from rankfold.gpu.record import Record, load
from sim.gloo import wire

_END = 40.0
"""Seconds that torchrun is given to end its processes; it kills them after 30."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch that has ended."""

    record: Record | None
    """None if there is none."""
    why: str
    """Why there is none, in one line."""
    code: int
    """torchrun's exit code."""
    seconds: float
    log: Path
    """What all processes have printed."""

    @property
    def whole(self) -> bool:
        """Whether the record says all that it should."""
        return self.record is not None and not self.record.broke


def command_of(plan: Plan, device: str, plan_file: Path, out: Path) -> list[str]:
    """The command that runs a plan on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(plan.topology.world_size)),
        *("-m", "rankfold", "worker", "record", plan.topology.word, "--device", device),
        *("--plan", str(plan_file), "--save", str(out)),
    ]


def launch(plan: Plan, device: str, folder: Path, limit: float) -> Launched:
    """Run a plan on the ranks of this machine.

    Args:
        plan: what to run.
        device: "cuda" or "cpu".
        folder: where the log stays; it exists.
        limit: seconds after which the launch is ended.
    """
    word = plan.topology.word
    plan_file, out, log = (folder / f"{word}.{end}" for end in ("plan", "record", "log"))
    plan_file.write_bytes(wire.dump(plan))
    out.unlink(missing_ok=True)
    started = time.monotonic()
    # One math thread for each rank, as torchrun sets it, but without its warning.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("w", encoding="utf-8") as written:
        torchrun = subprocess.Popen(
            command_of(plan, device, plan_file, out),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        late = False
        try:
            torchrun.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(torchrun)
    record, why = None, ""
    if late:
        why = f"not done after {limit:g} s"
    elif out.exists():
        record = load(out)
    else:
        why = _why(log, torchrun.returncode)
    for file in (plan_file, out):
        file.unlink(missing_ok=True)
    return Launched(
        record=record,
        why=why,
        code=torchrun.returncode,
        seconds=round(time.monotonic() - started, 1),
        log=log,
    )


def _end(torchrun: subprocess.Popen[bytes]) -> None:
    if torchrun.poll() is None:
        torchrun.terminate()
        try:
            torchrun.wait(_END)
        except subprocess.TimeoutExpired:
            torchrun.kill()
            torchrun.wait()


def _why(log: Path, code: int) -> str:
    """What a launch without a record says of itself."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines()]
    own = [line for line in lines if line.startswith("rankfold ")]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    said = (own or errors or ["it said nothing of its own"])[-1]
    return f"torchrun ended with exit code {code}: {said}"

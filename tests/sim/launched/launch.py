"""Starts torchrun on the jobs of a test, and reads what came of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sim.gloo import wire
from tests.sim.launched.jobs import Done, Job

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 240.0
"""Seconds for a launch: imports of several processes share few cores."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch that has ended."""

    code: int
    """torchrun's exit code."""
    output: str
    """Of all processes."""
    done: list[Done]
    seconds: float


def torchrun(count: int, *arguments: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Run a module on so many ranks."""
    # Standalone, so that launches side by side do not meet at one port.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*launcher, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )


def launch(folder: Path, count: int, *jobs: Job) -> Launched:
    """Run jobs one after the other on the ranks of one launch."""
    job, out = folder / "job", folder / "out"
    job.write_bytes(wire.dump(list(jobs)))
    started = time.monotonic()
    ended = torchrun(count, "tests.sim.launched.driver", str(job), str(out))
    done = wire.load(out.read_bytes()) if out.exists() else []
    return Launched(
        code=ended.returncode,
        output=ended.stdout,
        done=done,
        seconds=time.monotonic() - started,
    )

"""What the tests of the folded runtime share: programs, lines of programs, and broken runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from sim import RankContext, Schedule, SimError, World

ROOT = Path(__file__).resolve().parents[2]

Program = Callable[[RankContext], Any]
E = TypeVar("E", bound=SimError)

NOT_THE_CALLERS = re.compile(r"(torch/\w+|(?<!tests/)\bsim)/\w+\.py|threading\.py")
"""A report must point at none of these."""


def ones(size: int = 2) -> torch.Tensor:
    """Something to communicate."""
    return torch.ones(size)


def total_of_ranks(ctx: RankContext) -> float:
    """The smallest right program: the sum of all ranks' numbers."""
    x = torch.tensor([float(ctx.rank)])
    dist.all_reduce(x)
    return float(x)


def busy(ctx: RankContext) -> list[float]:
    """A right program with collectives on two groups, messages and handles out of order."""
    size = ctx.world_size
    halves = [dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))]
    mine = halves[ctx.rank >= size // 2]
    x, y = torch.full((3,), float(ctx.rank)), torch.full((2,), float(ctx.rank))
    first = dist.all_reduce(x, group=mine, async_op=True)
    second = dist.all_reduce(y, async_op=True)
    received = torch.empty(1)
    moves = [
        dist.isend(x.new_tensor([float(ctx.rank)]), (ctx.rank + 1) % size),
        dist.irecv(received, (ctx.rank - 1) % size),
    ]
    for work in (second, first, *moves):
        work.wait()
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, received)
    return [*x.tolist(), *y.tolist(), *gathered.tolist()]


def place(program: Callable[..., Any], text: str) -> str:
    """`file.py:line` of the only line of `program` that contains `text`."""
    lines, start = inspect.getsourcelines(program)
    found = [start + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1, f"{text!r} is on lines {found} of {program.__name__}"
    return f"{Path(inspect.getfile(program)).name}:{found[0]}"


def rank_threads() -> list[threading.Thread]:
    """The threads of ranks that live."""
    return [t for t in threading.enumerate() if re.fullmatch(r"rank\d+", t.name)]


def assert_usable() -> None:
    """A fresh world works, and no world has left a thread."""
    with World("tp2") as world:
        assert world.run(total_of_ranks) == [1.0, 1.0]
    assert rank_threads() == []


def broken_run(
    expected: type[E],
    program: Program,
    topology: str = "tp2",
    schedule: Schedule | None = None,
    **options: Any,
) -> E:
    """Run a program that must break with exactly this error, at once, and leave nothing behind."""
    with World(topology, **options) as world:
        start = time.perf_counter()
        with pytest.raises(SimError) as caught:
            world.run(program, schedule=schedule)
        seconds = time.perf_counter() - start
    error = caught.value
    assert type(error) is expected, error
    assert seconds < 1
    assert "\n" not in error.headline
    assert not NOT_THE_CALLERS.search(str(error)), error
    assert_usable()
    return error


def run_python(source: str, *arguments: str, seconds: float = 60, **environment: str) -> str:
    """Run Python source in a process of its own, from the repository's root; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

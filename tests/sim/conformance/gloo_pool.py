"""Real gloo processes that stay: forked once, then fed programs over pipes.

Starting processes and connecting them costs far more than a small program does, so a pool lives
for the whole test session. A rank that raises, dies or hangs is named, and new processes take
over from those that failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.sim.conformance.operands import raw_bytes

Program = Callable[..., list[torch.Tensor]]

GRACE = 1.0
"""Seconds that the other ranks get to come back once one has failed."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of a program: `program(rank, world_size, seed, **options)` on every rank."""

    program: Program
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rank: int, world_size: int) -> list[torch.Tensor]:
        """Run it as `rank`, on whatever transport the default group is."""
        torch.manual_seed(self.seed)  # each program sees the same global generator everywhere
        return self.program(rank, world_size, self.seed, **self.options)

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.program.__name__}(seed={self.seed}{options})"


class GlooFailure(RuntimeError):
    """A program that gloo's ranks did not finish; the message names each rank and what it met."""


@dataclass(kw_only=True)
class _Member:
    process: BaseProcess
    pipe: Connection


class GlooPool:
    """`world_size` gloo processes. Invariant: between two `run`s all of them wait for a program.

    Args:
        world_size: number of ranks.
        limit: seconds that one batch of programs may take.
    """

    def __init__(self, world_size: int, *, limit: float = 60.0) -> None:
        self.world_size = world_size
        self.limit = limit
        self._members: list[_Member] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, *batch: Invocation) -> list[list[list[torch.Tensor]]]:
        """Run a batch of programs, one after the other; return results[program][rank].

        Raises:
            GlooFailure: a rank raised, died or did not come back in time.
        """
        if not self._members:
            self._start()
        # Programs go by pickle, hence by name: they are top-level functions.
        message = pickle.dumps(batch)
        for member in self._members:
            with contextlib.suppress(BrokenPipeError):
                member.pipe.send_bytes(message)
        replies = self._collect()
        problems = [
            f"rank {rank}: {replies[rank]}"
            for rank in range(self.world_size)
            if isinstance(replies[rank], str)
        ]
        if problems:
            self.close()  # what a failure leaves in torch's state must not meet the next program
            programs = sorted({one.program.__name__ for one in batch})
            headline = f"gloo on {self.world_size} ranks did not finish {', '.join(programs)}"
            raise GlooFailure("\n".join([headline, *problems]))
        return [[replies[r][i] for r in range(self.world_size)] for i in range(len(batch))]

    def close(self) -> None:
        """End all processes, by force if need be. A later `run` starts new ones."""
        members, self._members = self._members, []
        for member in members:
            with contextlib.suppress(BrokenPipeError):
                member.pipe.send_bytes(pickle.dumps(()))  # no programs: the end
            member.pipe.close()
        deadline = time.monotonic() + GRACE
        for member in members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.process.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def pids(self) -> list[int]:
        """The process ids of the ranks that are there."""
        return [member.process.pid or 0 for member in self._members]

    def _start(self) -> None:
        if torch.get_num_threads() != 1:
            raise RuntimeError("call torch.set_num_threads(1) first: math threads break a fork")
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-")
        store = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("fork")
        ours: list[Connection] = []
        for rank in range(self.world_size):
            here, there = context.Pipe()
            ours.append(here)
            process = context.Process(
                target=_live,
                args=(rank, self.world_size, there, tuple(ours), str(store), self.limit),
                name=f"gloo{rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self._members.append(_Member(process=process, pipe=here))

    def _collect(self) -> list[Any]:
        """One reply a rank: its results, or a string that says how it failed."""
        replies: list[Any] = [None] * self.world_size
        open_: dict[Any, int] = {m.pipe: rank for rank, m in enumerate(self._members)}
        deadline = time.monotonic() + self.limit
        while open_:
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in open_.values():
                    replies[rank] = "did not come back (it hangs, or another rank left it alone)"
                return replies
            for pipe in ready:
                rank = open_.pop(pipe)
                try:
                    reply = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    replies[rank] = reply if isinstance(reply, str) else _unpacked(reply)
                except (EOFError, ConnectionResetError):
                    self._members[rank].process.join(GRACE)
                    replies[rank] = f"died, exit code {self._members[rank].process.exitcode}"
                if isinstance(replies[rank], str):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies


def _live(
    rank: int,
    world_size: int,
    pipe: Connection,
    parents: Sequence[Connection],
    store: str,
    limit: float,
) -> None:
    """A rank's life: connect, then run what comes over the pipe until the other end is closed."""
    for inherited in parents:
        inherited.close()  # else the end of the parent would go unnoticed
    faulthandler.disable()  # a crash is told by the exit code
    torch.set_num_threads(1)
    c10d._world = c10d._World()  # a folded world that was left behind has ranks of its own here
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit),
    )
    while True:
        try:
            batch = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return  # the parent has died
        if not batch:
            return
        reply: Any = []
        for invocation in batch:
            try:
                reply.append([_packed(t) for t in invocation(rank, world_size)])
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                mine = [f for f in frames if f.name == invocation.program.__name__]
                where = f"line {mine[-1].lineno}" if mine else "before it began"
                reply = f"{type(error).__name__} in {invocation}, {where}: {error}"
                break
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps(reply))


# Pickle does not know every dtype: tensors travel as (bytes, dtype, shape).
_Packed = tuple[bytes, torch.dtype, tuple[int, ...]]


def _packed(tensor: torch.Tensor) -> _Packed:
    return raw_bytes(tensor).numpy().tobytes(), tensor.dtype, tuple(tensor.shape)


def _unpacked(reply: list[list[_Packed]]) -> list[list[torch.Tensor]]:
    def one(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(dtype).reshape(shape) if data else flat.to(dtype).reshape(shape)

    return [[one(*packed) for packed in of_program] for of_program in reply]

"""Several workers as processes: forked from one that has imported vLLM, and watched.

One worker alone runs in the calling process: nothing is forked then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

GRACE = 60.0
"""Seconds that a worker has to come to an end after it was told to stop: enough to shrink what it
has found."""


def default_workers() -> int:
    """One for each core, to 8."""
    return min(8, os.cpu_count() or 1)


class WorkerDied(RuntimeError):
    """A worker ended without a word, or its own code raised; the message says which and how."""


class Link(Protocol):
    """What a worker has of the outside."""

    def send(self, message: object) -> None:
        """Hand a message to `handle`, in order."""
        ...

    def stopped(self) -> bool:
        """Whether to come to an end."""
        ...


Job = Callable[[Link, int], None]
"""What a worker does, given its number."""
Handle = Callable[[Any], None]
"""What the calling process does with a worker's message."""


@dataclass
class _Here:
    """The link of a worker in the calling process."""

    handle: Handle
    stop: Callable[[], bool]

    def send(self, message: object) -> None:
        self.handle(message)

    def stopped(self) -> bool:
        return self.stop()


@dataclass
class _There:
    """The link of a worker in a process of its own."""

    connection: Connection
    stop: Any

    def send(self, message: object) -> None:
        self.connection.send(("said", message))

    def stopped(self) -> bool:
        return bool(self.stop.is_set())


def run_workers(
    count: int,
    job: Job,
    handle: Handle,
    stop: Callable[[], bool] = lambda: False,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run a job on so many workers until all have ended.

    Fork only from a process that did no multi-threaded math and holds no world.

    Args:
        count: workers.
        job: given a link and the worker's number.
        handle: given each message, in the calling process.
        stop: whether the workers should come to an end.
        tick: called now and then, for a display.

    Raises:
        WorkerDied: the others are ended first.
    """
    if count == 1:
        job(_Here(handle, stop), 0)
        return
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    workers = {}
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_live, args=(job, number, theirs, ended), name=f"worker {number}", daemon=True
        )
        process.start()
        theirs.close()
        workers[ours] = process
    try:
        _attend(dict(workers), handle, stop, tick, ended)
    finally:
        ended.set()
        for connection, process in workers.items():
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()


def _attend(
    workers: dict[Connection, Any],
    handle: Handle,
    stop: Callable[[], bool],
    tick: Callable[[], None],
    ended: Any,
) -> None:
    """Listen to the workers until all are done. Once told to stop they have a while to end."""
    told: float | None = None
    while workers:
        for connection in wait([*workers], timeout=0.2):
            assert isinstance(connection, Connection)
            try:
                word, message = connection.recv()
            except EOFError:
                process = workers[connection]
                process.join(1.0)
                raise WorkerDied(
                    f"{process.name} ended with exit code {process.exitcode}"
                ) from None
            if word == "said":
                handle(message)
            elif word == "died":
                raise WorkerDied(f"{workers[connection].name}: {message}")
            else:
                del workers[connection]
        tick()
        if stop() and told is None:
            ended.set()
            told = time.monotonic()
        if told is not None and time.monotonic() - told > GRACE:
            return


def _live(job: Job, number: int, connection: Connection, ended: Any) -> None:
    """A worker's whole life. The parent alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        job(_There(connection, ended), number)
        connection.send(("done", None))
    except BaseException:
        code = 1
        with contextlib.suppress(OSError):
            connection.send(("died", traceback.format_exc()))
    connection.close()
    # What the parent had registered to run at its own exit is not this process's business.
    os._exit(code)

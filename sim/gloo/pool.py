"""A pool of rank processes: forked once, used by one world after the other.

Everything that the ranks hold is unnamed or theirs alone: sockets without a name, a journal file
without a name, ports that close with their process. So nothing is left behind, however they end.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self

from torch._C._distributed_c10d import TCPStore

from ..errors import Misuse
from .journal import Reader
from .zygote import LONGEST

_END = 5.0
"""Seconds that the zygote is given to end its ranks before it is ended itself."""


class Channel(Protocol):
    """Whole messages to a rank and back, as `multiprocessing.connection.Connection` has them."""

    def send_bytes(self, buf: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def poll(self, timeout: float = ..., /) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One rank process, seen from the calling process."""

    pid: int
    channel: Channel
    control: Channel
    journal: Reader
    file: Any

    def close(self) -> None:
        """Close the sockets, which ends the process."""
        self.channel.close()
        self.control.close()
        self.file.close()


class Pool(Protocol):
    """Where a world's ranks come from, and go back to. For what each does, see `GlooPool`."""

    def take(self, count: int) -> list[Member]: ...
    def give(self, members: Sequence[Member]) -> None: ...
    def drop(self, members: Sequence[Member]) -> None: ...
    def reap(self, member: Member) -> int | None: ...
    def store(self) -> tuple[str, int, str]: ...


class GlooPool:
    """Rank processes that wait for a world. A context manager.

    Starting is begun at once and does not block; the first world waits for it.

    Args:
        prepare: called in the zygote before the first fork, to import what all ranks need. It
            must start no thread. A top-level function of a module.
    """

    def __init__(self, prepare: Callable[[], object] | None = None) -> None:
        self._prepare = pickle.dumps(prepare).hex()
        self._idle: list[Member] = []
        self._zygote: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._store: Any = None
        self._worlds = itertools.count()
        self._lock = threading.Lock()
        self._start()

    def take(self, count: int) -> list[Member]:
        """So many ranks; those that are missing are forked.

        Raises:
            Misuse: the preparation failed, or the pool is closed.
        """
        with self._lock:
            idle, self._idle = self._idle, []
            taken: list[Member] = []
            for member in idle:
                if member.channel.poll() or member.control.poll():
                    self._drop([member])  # it died while it waited
                elif len(taken) < count:
                    taken.append(member)
                else:
                    self._idle.append(member)
            while len(taken) < count:
                taken.append(self._fork())
            return taken

    def give(self, members: Sequence[Member]) -> None:
        """Ranks that have left their world, for the next one."""
        self._idle.extend(members)

    def drop(self, members: Sequence[Member]) -> None:
        """End ranks, whatever they do."""
        with self._lock:
            self._drop(members)

    def reap(self, member: Member) -> int:
        """The exit code of a rank that has died; below 0 for a signal."""
        with self._lock:
            try:
                return int(self._ask(f"reap {member.pid}"))
            except (OSError, ValueError):
                return 0

    def store(self) -> tuple[str, int, str]:
        """Host, port and prefix of the store through which the ranks of a new world meet."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self._store.port, f"world{next(self._worlds)}"

    def warm(self, count: int) -> None:
        """Have so many ranks ready."""
        self.give(self.take(count))

    def pids(self) -> list[int]:
        """Process ids of the zygote and of the ranks that wait."""
        zygote = [] if self._zygote is None else [self._zygote.pid]
        return zygote + [member.pid for member in self._idle]

    def close(self) -> None:
        """End all processes. Closing again is harmless."""
        idle, self._idle = self._idle, []
        for member in idle:
            member.close()
        self._store = None
        zygote, self._zygote = self._zygote, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if zygote is None:
            return
        try:
            # While it still prepares it would not notice.
            zygote.wait(_END) if self._ready else zygote.kill()
        except subprocess.TimeoutExpired:
            zygote.kill()
        zygote.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- the zygote ---

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from sim.gloo.zygote import main; "
            f"main({theirs.fileno()}, {self._prepare!r})"
        )
        # One thread each: math threads would not survive the fork, and cores are few.
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # The terminal sends Ctrl-C to this process's group only, and it ends the others.
            process_group=0,
            env={**os.environ, **single},
        )
        theirs.close()
        self._socket, self._ready = ours, False

    def _await(self) -> None:
        if self._socket is None:
            raise Misuse("this pool of ranks is closed; make a new one")
        if self._ready:
            return
        said = self._socket.recv(LONGEST).decode()
        if said != "ready":
            why = said.removeprefix("failed ").strip().splitlines() or ["it ended"]
            self.close()
            raise Misuse(f"the ranks' processes could not be prepared: {why[-1]}")
        self._ready = True

    def _ask(self, request: str, descriptors: Sequence[int] = ()) -> str:
        self._await()
        assert self._socket is not None
        socket.send_fds(self._socket, [request.encode()], list(descriptors))
        said = self._socket.recv(LONGEST).decode()
        if not said:
            raise OSError("the zygote has ended")
        return said

    def _fork(self) -> Member:
        self._await()
        for attempt in range(2):
            try:
                return self._fork_once()
            except OSError:
                # Somebody ended the zygote: its ranks went with it.
                if attempt:
                    raise
                self._restart()
        raise AssertionError

    def _fork_once(self) -> Member:
        channels, controls = socket.socketpair(), socket.socketpair()
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the member closes it)
        theirs = [channels[1].fileno(), controls[1].fileno(), file.fileno()]
        try:
            pid = int(self._ask("fork", theirs))
        except OSError:
            for end in (*channels, *controls):
                end.close()
            file.close()
            raise
        channels[1].close()
        controls[1].close()
        return Member(
            pid=pid,
            channel=Connection(channels[0].detach()),
            control=Connection(controls[0].detach()),
            journal=Reader(file.fileno()),
            file=file,
        )

    def _restart(self) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
        if self._socket is not None:
            self._socket.close()
        self._start()

    def _drop(self, members: Sequence[Member]) -> None:
        if members and self._socket is not None:
            with suppress(OSError):  # the zygote has ended, and the ranks with it
                self._ask("end " + " ".join(str(member.pid) for member in members))
        for member in members:
            member.close()


def ready(members: Sequence[Member], seconds: float) -> list[Member]:
    """Which of these have something to say, after at most so many seconds."""
    channels = {member.channel: member for member in members}
    said = wait(list(channels), timeout=seconds)  # type: ignore[arg-type]
    return [channels[channel] for channel in said]  # type: ignore[index]

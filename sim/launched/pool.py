"""The ranks that torchrun has started, as the driver in rank 0's process sees them."""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from ..errors import Misuse
from ..gloo.pool import Member
from .environment import Launch
from .lines import CONTROL, MAIN, RankLine, welcome

ARRIVE = 600.0
"""Seconds in which all ranks have to connect; by then each has imported what it needs. torchrun
ends all of them sooner if one fails."""
STOP = b"stop"
ADDRESS = "rankfold/address"
"""The key of the driver's address in the launcher's store."""


class LaunchedPool:
    """All ranks of a launch. A context manager; at its end the ranks end.

    `sim.gloo.GlooWorld` takes them, all at once, for one world after the other. A world that
    broke cannot give its ranks back: then there is no other one.
    """

    def __init__(self, launch: Launch, store: Any) -> None:
        """Be found by the ranks, which connect later.

        Args:
            launch: rank 0's.
            store: the launcher's.
        """
        self._launch = launch
        self._key = secrets.token_hex(16)
        host = "127.0.0.1" if launch.one_machine else launch.host
        self._socket = socket.create_server(
            (host if launch.one_machine else "", 0), backlog=2 * launch.world_size
        )
        port = self._socket.getsockname()[1]
        self._members: list[Member] | None = None
        self._taken = self._ended = False
        self._worlds = itertools.count()
        store.set(ADDRESS, f"{host} {port} {self._key}")

    @property
    def broken(self) -> bool:
        """Whether a world broke, so that a rank may be stuck in it."""
        return self._ended

    def await_ranks(self, seconds: float = ARRIVE) -> None:
        """Wait until every rank has connected.

        Raises:
            Misuse: some did not in time; says which.
        """
        lines: dict[tuple[int, str], tuple[Connection, int]] = {}
        wanted = {(r, p) for r in range(self._launch.world_size) for p in (MAIN, CONTROL)}
        deadline = time.monotonic() + seconds
        while lines.keys() < wanted:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                line, _ = self._socket.accept()
            except TimeoutError:
                ranks = sorted({rank for rank, _ in wanted - lines.keys()})
                raise Misuse(f"ranks {ranks} did not connect within {seconds:g} s") from None
            known = welcome(line, self._key)
            if known is not None:
                connection, hello = known
                lines[hello["rank"], hello["purpose"]] = connection, hello["pid"]
        self._socket.close()
        self._members = []
        for rank in range(self._launch.world_size):
            (main, pid), (control, _) = lines[rank, MAIN], lines[rank, CONTROL]
            line_to = RankLine(main)
            self._members.append(
                Member(
                    pid=pid,
                    channel=line_to,
                    control=control,
                    journal=line_to.journal,
                    file=line_to,
                )
            )

    def take(self, count: int) -> list[Member]:
        """All ranks.

        Raises:
            Misuse: there are more or fewer, they are in a world, or a world broke.
        """
        if self._members is None:
            self.await_ranks()
        assert self._members is not None
        if count != len(self._members):
            raise Misuse(f"{count} ranks were asked for, and {len(self._members)} are launched")
        if self._taken or self._ended:
            why = "their world broke" if self._ended else "they are in a world already"
            raise Misuse(f"the launched ranks cannot be had: {why}")
        self._taken = True
        return list(self._members)

    def give(self, members: Sequence[Member]) -> None:
        """The ranks have left their world."""
        self._taken = False

    def drop(self, members: Sequence[Member]) -> None:
        """End the ranks, whatever they do."""
        self._ended = True
        for member in members:
            with suppress(OSError):
                member.control.send_bytes(STOP)

    def reap(self, member: Member) -> None:
        """The exit code of a rank that has died, which only its launcher knows."""

    def store(self) -> tuple[str, int, str]:
        """Host, port and prefix of the store through which the ranks of a new world meet."""
        return self._launch.host, self._launch.port, f"rankfold/world{next(self._worlds)}"

    def close(self) -> None:
        """End the ranks. Closing again is harmless."""
        self._socket.close()
        members, self._members = self._members or [], []
        for member in members:
            with suppress(OSError):
                member.control.send_bytes(STOP)
        for member in members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

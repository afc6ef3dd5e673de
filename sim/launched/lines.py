"""The connections between the driver and the ranks.

Each rank makes two, both to the driver: on one it is sent programs, and answers with what it notes
of its operations and then with the result, so that all notes are there before the result is; the
other is for questions while a program runs. A line says who it is before anything is unpickled.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..gloo.journal import Reader

MAIN, CONTROL = "main", "control"
NOTE, REPLY = b"n", b"r"
"""What the first byte of a message from a rank says that the rest is."""
_GREETING = 4096
_GREET = 30.0
"""Seconds that whoever connects is given to say who it is."""


def greet(address: tuple[str, int], key: str, rank: int, purpose: str) -> Connection:
    """Connect to the driver."""
    line = socket.create_connection(address, timeout=_GREET)
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(line.detach())
    hello = {"key": key, "rank": rank, "pid": os.getpid(), "purpose": purpose}
    connection.send_bytes(json.dumps(hello).encode())
    return connection


def welcome(line: socket.socket, key: str) -> tuple[Connection, dict[str, Any]] | None:
    """Who has connected; None for a stranger, who is cut off."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(line.detach())
    with suppress(OSError, EOFError, ValueError, AttributeError):
        if connection.poll(_GREET):
            hello = json.loads(connection.recv_bytes(_GREETING))
            if hmac.compare_digest(str(hello.get("key")), key):
                return connection, hello
    connection.close()
    return None


class RankLine:
    """The main line to one rank. Its notes go into a journal's file, replies are received here.

    A thread attends to it, so that a rank never waits for the driver to read.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed with the line)
        self.journal = Reader(self._file.fileno())
        ours, theirs = socket.socketpair()
        self._replies, self._forward = Connection(ours.detach()), Connection(theirs.detach())
        self._thread = threading.Thread(target=self._attend, name="rank-line", daemon=True)
        self._thread.start()

    def send_bytes(self, buf: bytes, /) -> None:
        """Send a request."""
        self._connection.send_bytes(buf)

    def recv_bytes(self) -> bytes:
        """The next reply. Raises EOFError if the rank is gone."""
        return self._replies.recv_bytes()

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Whether there is a reply, or the rank is gone."""
        return self._replies.poll(timeout)

    def fileno(self) -> int:
        """Readable when `poll` is true."""
        return self._replies.fileno()

    def close(self) -> None:
        """Cut the line. Closing again is harmless."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            # Before `close`, which would leave the thread reading from a number that is used again.
            line.shutdown(socket.SHUT_RDWR)
        self._thread.join(_GREET)
        self._connection.close()
        self._replies.close()
        self._file.close()

    def _attend(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv_bytes()
                if message[:1] == NOTE:
                    os.write(self._file.fileno(), memoryview(message)[1:])
                else:
                    self._forward.send_bytes(message[1:])
        self._forward.close()

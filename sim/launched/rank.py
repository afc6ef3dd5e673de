"""A rank that torchrun has started: it answers the driver until the driver is done.

In rank 0's process this runs on a thread beside the driver, elsewhere on the main thread. A second
thread answers while a program is stuck, and ends the process when the driver is gone.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..callsite import CallSites
from ..gloo import front
from ..gloo.journal import Journal, Note
from ..gloo.rank import RankProcess
from .ending import BROKE, end_now
from .environment import Launch
from .lines import CONTROL, MAIN, NOTE, REPLY, greet
from .pool import ADDRESS, STOP


class SentJournal(Journal):
    """A journal whose notes go to the driver at once."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__(-1)
        self._send = send

    def _write(self, note: Note) -> None:
        self._send(NOTE + pickle.dumps(note, pickle.HIGHEST_PROTOCOL))


class _Line:
    """The rank's end of its main line; several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a whole message. A driver that is gone is the control thread's business."""
        with self._lock:
            self._connection.send_bytes(message)

    def receive(self) -> bytes | None:
        """The next request, or None when the driver has cut the line."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None


def serve(
    launch: Launch,
    store: Any,
    *,
    fabric: Callable[[Journal, CallSites], front.GlooFabric],
    backend: str,
    begin: Callable[[], object] = lambda: None,
) -> None:
    """A rank's life, until the driver is done.

    Args:
        launch: this process's.
        store: the launcher's.
        fabric: makes the transport of a world.
        backend: what programs ask for and are told that they have: "gloo" or "nccl".
        begin: called on this thread first.
    """
    begin()
    torch.set_num_threads(1)
    host, port, key = store.get(ADDRESS).decode().split()
    address = (host, int(port))
    line = _Line(greet(address, key, launch.rank, MAIN))
    rank = RankProcess(SentJournal(line.send), fabric=fabric, backend=backend, launched=True)
    control = greet(address, key, launch.rank, CONTROL)
    threading.Thread(
        target=_answer, args=(control, rank, launch), name="control", daemon=True
    ).start()
    front.install()
    while (request := line.receive()) is not None:
        try:
            line.send(REPLY + rank.handle(request))
        except OSError:
            return


def _answer(control: Connection, rank: RankProcess, launch: Launch) -> None:
    while True:
        try:
            data = control.recv_bytes()
            if data == STOP:
                break
            control.send_bytes(rank.look(data))
        except (EOFError, OSError):
            if launch.rank:
                gone = f"rank {launch.rank}: rank 0's process is gone, so this one ends"
                end_now(BROKE, gone)
            return
    if launch.rank:
        end_now(0)

"""A rank process: it joins a world, runs programs there, leaves it, and is ready for the next.

Two threads: the main one runs programs; the other one answers while the main one is stuck, and
ends the process as soon as the calling process is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .. import c10d
from ..callsite import CallSites
from ..errors import RankAborted
from ..rank_local import TORCH_STATE, Entry, StateSwap
from ..reports import in_a_line
from ..topology import Topology
from ..world import RankContext
from . import front, wire
from .journal import Journal


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The world that a rank is to join."""

    rank: int
    topology: Topology
    store: tuple[str, int, str]
    """Host and port of the ranks' store, and the world's prefix in it."""
    rank_local: tuple[Entry, ...]
    plumbing: tuple[str, ...]
    within: Callable[[], AbstractContextManager[None]] | None
    """What the rank's programs run under."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A program to run."""

    program: Callable[..., Any]
    arguments: tuple[Any, ...]


class Leaving:
    """The world is over."""


def live(channel: int, control: int, journal: int) -> None:
    """A rank's life, until the calling process closes its end.

    Args:
        channel: descriptor of the socket over which programs and results go.
        control: of the one that the second thread answers.
        journal: of the journal's file.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    front.install()
    rank = RankProcess(Journal(journal))
    answering = threading.Thread(
        target=_answer, args=(Connection(control), rank), name="control", daemon=True
    )
    answering.start()
    caller = Connection(channel)
    while True:
        try:
            data = caller.recv_bytes()
        except (EOFError, OSError):
            return
        reply = rank.handle(data)
        try:
            caller.send_bytes(reply)
        except OSError:
            return


def _answer(control: Connection, rank: RankProcess) -> None:
    while True:
        try:
            data = control.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        reply = rank.look(data)
        try:
            control.send_bytes(reply)
        except OSError:
            os._exit(1)


class RankProcess:
    """What this process is in its world."""

    def __init__(
        self,
        journal: Journal,
        *,
        fabric: Callable[[Journal, CallSites], front.GlooFabric] = front.GlooFabric,
        backend: str = "gloo",
        launched: bool = False,
    ) -> None:
        """Belong to no world yet.

        Args:
            journal: where operations are noted.
            fabric: makes the transport of a world.
            backend: what a program asks for and is told that it has.
            launched: whether a launcher has set this process's environment, which then stands.
        """
        self._journal = journal
        self._make_fabric, self._backend, self._launched = fabric, backend, launched
        self._context: RankContext | None = None
        self._fabric: front.GlooFabric | None = None
        self._sites = CallSites()
        self._leave = ExitStack()

    def handle(self, data: bytes) -> bytes:
        """Do what is asked; the reply is a pickled result, or `Raised`."""
        return self._replied(lambda: self._do(wire.load(data)))

    def look(self, data: bytes) -> bytes:
        """Run a function of the context beside the main thread."""

        def do() -> Any:
            asked: Running = wire.load(data)
            return asked.program(self._context, *asked.arguments)

        return self._replied(do)

    def _replied(self, do: Callable[[], Any]) -> bytes:
        try:
            return wire.dump(do())
        except BaseException as raised:
            cause = raised.__cause__
            error = cause if isinstance(raised, RankAborted) and cause is not None else raised
            return wire.dump(wire.raised(error, in_a_line(error, self._sites)))

    def _do(self, asked: Joining | Running | Leaving) -> Any:
        if isinstance(asked, Joining):
            self._join(asked)
        elif isinstance(asked, Leaving):
            self._leave.close()
            self._context = self._fabric = None
        else:
            assert self._fabric is not None
            self._fabric.begin()
            return asked.program(self._context, *asked.arguments)
        return None

    def _join(self, asked: Joining) -> None:
        """Begin as a process that was never a rank: with fresh state of torch and of the table."""
        size, rank = asked.topology.world_size, asked.rank
        environment = None if self._launched else c10d.launcher_environment(size)
        swap = StateSwap([*TORCH_STATE, *asked.rank_local], environment)
        swap.save(None)
        swap.new_rank(rank)
        swap.load(rank)
        self._leave.callback(swap.load, None)
        self._sites = CallSites(asked.plumbing)
        self._fabric = self._make_fabric(self._journal, self._sites)
        self._fabric.begin()
        front.enter(self._fabric, size)
        host, port, prefix = asked.store
        server = TCPStore(host, port, is_master=False, wait_for_workers=False)
        store = PrefixStore(prefix, server)
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=size)
        self._leave.callback(_destroy)
        if asked.within is not None:
            self._leave.enter_context(asked.within())
        self._context = RankContext(rank, size, asked.topology)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

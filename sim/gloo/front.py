"""The front door in a rank process: torch's calls are noted, then carried out by real gloo.

It is the folded front door with another transport behind it, so operations have the same names,
numbers and call sites on both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..calls import Call
from ..callsite import CallSites
from ..collectives import COLLECTIVES
from ..errors import NotAMember, RankAborted
from ..fabric import Group
from ..mailbox import Post
from ..process_group import FoldedProcessGroup
from .carried import Carried
from .carry import carry, carry_post
from .journal import Journal

BACKEND = "noted"
"""The backend's name in torch.distributed."""

_NEVER = timedelta(days=1)
"""gloo's own limit. The calling process sees deaths and hangs, and ends the ranks."""


class GlooFabric:
    """One rank's transport in one world: a gloo group behind each group of the program."""

    def __init__(self, journal: Journal, sites: CallSites) -> None:
        self.sites = sites
        self._journal = journal
        self._device: Any = None
        self._transports: dict[Group, Any] = {}
        self._alive: set[GlooWork] = set()

    def begin(self) -> None:
        """A run starts: count operations from 0."""
        for group in self._transports:
            group.renumber()
        self._alive.clear()
        self._journal.begin()

    def join(self, options: Any, world_size: int, asked: str) -> FoldedProcessGroup:
        """Make a group with its other members.

        Args:
            options: c10d's.
            world_size: number of ranks.
            asked: the backend that the program asked for.

        Returns:
            This rank's view of the group.
        """
        ranks: Iterable[int] = options.global_ranks_in_group or range(world_size)
        group = Group(str(options.group_id), tuple(ranks))
        alone = len(group.ranks) == 1
        self._transports[group] = None if alone else self.connect(options, len(group.ranks), asked)
        return GlooProcessGroup(self, group, options.group_rank)

    def connect(self, options: Any, size: int, asked: str) -> Any:
        """What `carry` is given to carry a group's operations out; `options` are c10d's."""
        make: Any = dist.ProcessGroupGloo
        if self._device is None:
            self._device = self.gloo_device()
        settings = make._Options()
        settings._devices, settings._threads = [self._device], 1
        settings._timeout = _NEVER
        return make(options.store, options.group_rank, size, settings)

    def gloo_device(self) -> Any:
        """The network interface that gloo uses: by default the one within this machine."""
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def carry(self, transport: Any, call: Call) -> Carried:
        """Start a collective."""
        return carry(transport, call)

    def carry_post(self, transport: Any, post: Post) -> Carried:
        """Start a send or a receive."""
        return carry_post(transport, post)

    def leave(self, group: Group, index: int) -> None:
        """This rank is done with a group."""
        self._transports.pop(group, None)

    def collective(self, group: Group, index: int, call: Call) -> GlooWork:
        """Start a collective."""
        call.site = self.sites.here()
        call.sequence = group.next[index]
        group.next[index] += 1
        number = self._journal.call(group, index, call)
        transport = self._transports[group]
        if transport is None:
            with torch.no_grad():
                COLLECTIVES[call.op].run([call])
            carried = Carried()
        else:
            carried = self.carry(transport, call)
        outputs = [t for bucket in call.outputs for t in bucket]
        return GlooWork(self._journal, number, carried, outputs, self._alive, call.blocking)

    def post(self, group: Group, post: Post) -> GlooWork:
        """Post a send or a receive."""
        post.site = self.sites.here()
        number = self._journal.post(group, post)
        carried = self.carry_post(self._transports[group], post)
        outputs = [] if post.op == "send" else [post.tensor]
        return GlooWork(self._journal, number, carried, outputs, self._alive, False)


class GlooProcessGroup(FoldedProcessGroup):
    """One rank's view of a group over gloo."""

    def __init__(self, fabric: Any, group: Group, index: int) -> None:
        super().__init__(fabric, group, index)

    def getBackendName(self) -> str:
        return BACKEND

    def __repr__(self) -> str:
        return f"<gloo group {self.group}, rank {self._rank}>"

    def _check_caller(self, op: str) -> None:
        """A process is one rank: whichever thread calls."""


class GlooWork(dist.Work):
    """One rank's part in an operation over gloo."""

    def __init__(
        self,
        journal: Journal,
        number: int,
        carried: Carried,
        outputs: list[torch.Tensor],
        alive: set[GlooWork],
        blocking: bool,
    ) -> None:
        super().__init__()
        self._journal, self._number, self._carried = journal, number, carried
        self._outputs, self._alive, self._noted = outputs, alive, blocking
        self._done = False
        self._lock = threading.Lock()
        # C++ may hold the only other reference, which does not keep a Python object.
        alive.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until gloo has carried it out, and write the outputs."""
        if not self._done:
            if not self._noted:
                self._journal.waits(self._number)
            for work in self._carried.works:
                work.wait()
            self._finish()
        self._alive.discard(self)
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is complete, as gloo says."""
        if not self._done and all(work.is_completed() for work in self._carried.works):
            self._finish()
        return self._done

    def is_success(self) -> bool:
        """Whether it is complete."""
        return self._done

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """The sender of a received message, as a rank in the group."""
        return int(self._carried.works[0]._source_rank())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the output tensors; gloo has one for collectives only."""
        futures = [work.get_future() for work in self._carried.works]

        def end(_: Any) -> list[torch.Tensor]:
            self._finish()
            return self._outputs

        return torch.futures.collect_all(futures).then(end)

    def _finish(self) -> None:
        with self._lock:
            if not self._done:
                self._carried.finish()
                self._journal.done(self._number)
                self._done = True


_originals: dict[str, Any] = {}
_current: list[tuple[GlooFabric, int]] = []
"""The world that this process is a rank of now, if any: its transport and size."""
_asked: list[str] = [""]
"""The backend that the program asked for in the call that is making a group."""


def install() -> None:
    """Give this process noted groups, whatever backend a program asks for. Once a process."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _originals["make"] = c10d._new_process_group_helper
    module: Any = c10d
    module._new_process_group_helper = _make_group
    module._warn_not_in_group = _refuse


def enter(fabric: GlooFabric, world_size: int) -> None:
    """From now on groups are made on this transport."""
    _current[:] = [(fabric, world_size)]


def _create(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    fabric, size = _current[0]
    return fabric.join(options, size, _asked[0])


def _make_group(
    size: int, rank: int, ranks: list[int], asked: Any, *rest: Any, **options: Any
) -> Any:
    """Stands for `_new_process_group_helper`; the program is told that it got what it asked for."""
    for name in ("backend_options", "pg_options", "device_id"):
        if options.get(name) is not None:
            options[name] = None
    _asked[0] = str(asked)
    made = _originals["make"](size, rank, ranks, dist.Backend(BACKEND), *rest, **options)
    if isinstance(made[0], dist.ProcessGroup):
        c10d._world.pg_map[made[0]] = (dist.Backend(str(asked)), made[1])
    return made


def _refuse(op_name: str) -> NoReturn:
    """Stands for `_warn_not_in_group`, after which torch would skip the call on this rank."""
    fabric, _ = _current[0]
    refused = NotAMember(
        f"rank {dist.get_rank()} called {op_name} at {fabric.sites.here()} on a group that it "
        "is not in; torch would only warn, and skip the call on this rank"
    )
    # No `Exception`: torch would log it with the group's backend, which fails for such a group.
    raise RankAborted from refused

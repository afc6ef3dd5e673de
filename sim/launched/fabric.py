"""The transport of launched ranks: gloo for tensors of the CPU, and for those of a GPU NCCL.

Ranks that share a GPU have no NCCL between them, which wants one for each. Their tensors go over
gloo by way of the CPU: slow, and the same values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..calls import Call
from ..callsite import CallSites
from ..gloo.carried import Carried
from ..gloo.carry import carry, carry_post
from ..gloo.front import GlooFabric
from ..gloo.journal import Journal
from ..mailbox import Post
from .staging import staged, staged_post

_NCCL_LIMIT = timedelta(minutes=10)
"""After which NCCL's own watchdog ends the process; the driver is quicker."""
_POLL = 20e-6
"""Seconds between two looks at an operation on a GPU."""


class DeviceFabric(GlooFabric):
    """One rank's transport in one world."""

    def __init__(
        self, journal: Journal, sites: CallSites, *, nccl: bool = False, one_machine: bool = True
    ) -> None:
        """Have no groups yet.

        Args:
            journal, sites: see `GlooFabric`.
            nccl: whether this rank has a GPU for itself.
            one_machine: whether all ranks are on this machine; else gloo uses the interface that
                the host's name stands for, or GLOO_SOCKET_IFNAME.
        """
        super().__init__(journal, sites)
        self._nccl, self._one_machine = nccl, one_machine

    def gloo_device(self) -> Any:
        if self._one_machine:
            return super().gloo_device()
        make: Any = dist.ProcessGroupGloo
        return make.create_default_device()

    def connect(self, options: Any, size: int, asked: str) -> Any:
        gloo = super().connect(options, size, asked)
        return Transports(gloo=gloo, options=options, size=size, asked=asked)

    def carry(self, transport: Any, call: Call) -> Carried:
        tensors = (t for side in (call.inputs, call.outputs) for bucket in side for t in bucket)
        kind = next((tensor.device.type for tensor in tensors), "")
        if kind in ("", "cpu"):
            return carry(self._of_cpu(transport, kind), call)
        if self._nccl:
            return _on_gpu(carry(transport.nccl, call))
        return staged(transport.gloo, call)

    def carry_post(self, transport: Any, post: Post) -> Carried:
        kind = post.tensor.device.type
        if kind == "cpu":
            return carry_post(self._of_cpu(transport, kind), post)
        if self._nccl:
            return _on_gpu(carry_post(transport.nccl, post))
        return staged_post(transport.gloo, post)

    def _of_cpu(self, transport: Transports, kind: str) -> Any:
        if kind and transport.asked == "nccl":
            raise RuntimeError(
                "a tensor of the CPU on a group with backend nccl, which has none for it; move it "
                "to the GPU, or use the group's gloo twin"
            )
        return transport.gloo


@dataclass(kw_only=True)
class Transports:
    """What carries one group's operations out."""

    gloo: Any
    options: Any
    """c10d's, of the group."""
    size: int
    asked: str
    """The backend that the program asked for."""

    @cached_property
    def nccl(self) -> Any:
        """Connected at the first operation on a GPU, as torch does it."""
        make: Any = dist
        settings = make.ProcessGroupNCCL.Options()
        settings._timeout = _NCCL_LIMIT
        settings.global_ranks_in_group = list(self.options.global_ranks_in_group)
        settings.group_name = str(self.options.group_id)
        store = PrefixStore("nccl", self.options.store)
        return make.ProcessGroupNCCL(store, self.options.group_rank, self.size, settings)


class _GpuWork:
    """An operation on a GPU whose wait is over when it has happened.

    NCCL's own wait only makes the GPU wait, so that nobody could tell in which operation a rank is
    stuck.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait, also for the GPU."""
        # First, so that a GPU that never gets there does not hold up its stream, over which what
        # the rank has recorded is read.
        while not self._work.is_completed():
            time.sleep(_POLL)
        self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _on_gpu(carried: Carried) -> Carried:
    carried.works = [_GpuWork(work) for work in carried.works]
    return carried

"""Which transport carries a tensor; backends are stood in for, and the meta device is the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sim.calls import Call
from sim.callsite import CallSites
from sim.gloo.journal import Journal
from sim.launched.fabric import DeviceFabric, Transports
from sim.mailbox import Post
from sim.reduction import Reduction


class Work:
    """An operation that is complete at the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.waited_after = -1

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self) -> None:
        self.waited_after = self.looks


class Backend:
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.work = Work()

    def __getattr__(self, name: str) -> Any:
        def called(*_: Any) -> Work:
            self.calls.append(name)
            return self.work

        return called


def transports(asked: str) -> Transports:
    """A group's, with stand-ins for both backends."""
    made = Transports(gloo=Backend(), options=None, size=2, asked=asked)
    vars(made)["nccl"] = Backend()
    return made


def summed(device: str) -> Call:
    """A call of all_reduce."""
    buckets = [[torch.empty(4, device=device)]]
    total = Reduction("sum")
    return Call("all_reduce", rank=0, inputs=buckets, outputs=buckets, reduction=total)


def fabric(*, nccl: bool) -> DeviceFabric:
    """One rank's."""
    return DeviceFabric(Journal(-1), CallSites(), nccl=nccl)


def test_tensors_of_a_gpu_go_over_nccl_and_those_of_the_cpu_over_gloo() -> None:
    for device, used in (("meta", "nccl"), ("cpu", "gloo")):
        group = transports("gloo")
        fabric(nccl=True).carry(group, summed(device))
        assert {name: getattr(group, name).calls for name in ("nccl", "gloo")} == {
            "nccl": ["allreduce"] * (used == "nccl"),
            "gloo": ["allreduce"] * (used == "gloo"),
        }


def test_messages_likewise() -> None:
    group = transports("nccl")
    post = Post("send", 0, 0, 1, 0, torch.empty(4, device="meta"), "rank 1")
    fabric(nccl=True).carry_post(group, post)
    assert (group.nccl.calls, group.gloo.calls) == (["send"], [])


def test_a_barrier_goes_over_gloo() -> None:
    group = transports("nccl")
    fabric(nccl=True).carry(group, Call("barrier", rank=0, inputs=[], outputs=[]))
    assert (group.nccl.calls, group.gloo.calls) == ([], ["barrier"])


def test_an_operation_on_a_gpu_is_waited_for_until_it_has_happened() -> None:
    group = transports("nccl")
    [work] = fabric(nccl=True).carry(group, summed("meta")).works
    work.wait()
    # NCCL's own wait comes last: before, it would hold up the stream of a rank that is stuck.
    assert group.nccl.work.waited_after == 3


def test_a_tensor_of_the_cpu_on_an_nccl_group_is_refused_as_nccl_would() -> None:
    with pytest.raises(RuntimeError, match="tensor of the CPU on a group with backend nccl"):
        fabric(nccl=True).carry(transports("nccl"), summed("cpu"))
    post = Post("send", 0, 0, 1, 0, torch.empty(4), "rank 1")
    with pytest.raises(RuntimeError, match="use the group's gloo twin"):
        fabric(nccl=True).carry_post(transports("nccl"), post)

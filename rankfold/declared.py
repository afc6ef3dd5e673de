"""How declarations reach the sanitizer: those of `rankfold.replicated` and those of DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh

from properties.sanitizer import Sanitizer
from rankfold.declare import listening
from sim import Topology
from sim.baton import thread_rank
from sim.callsite import CallSites

PLUMBING = ("rankfold/declare.py", "rankfold/declared.py", "rankfold/ddp.py", "rankfold/script.py")
"""Files that stand between a script and what it calls."""


def tensors_in(value: Any) -> list[torch.Tensor] | None:
    """The tensors of a value, numbers among them, in order; None if it holds anything else."""
    if isinstance(value, dtensor.DTensor):
        return [value.to_local()]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, bool | int | float | complex):
        return [torch.tensor(value)]
    if isinstance(value, torch.nn.Module):
        return [parameter.detach() for parameter in value.parameters()]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return None
    found: list[torch.Tensor] = []
    for each in value:
        inside = tensors_in(each)
        if inside is None:
            return None
        found += inside
    return found


def ranks_of(group: Any, topology: Topology) -> tuple[int, ...]:
    """The global ranks of a process group, a device mesh of one dim or, if None, the default
    group; () for a group that this rank is not in."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if group is None and not dist.is_initialized():
        return tuple(range(topology.world_size))
    if isinstance(group, int):  # torch's mark for a rank outside of the group
        return ()
    return tuple(dist.get_process_group_ranks(group))


@contextlib.contextmanager
def declarations(sanitizer: Sanitizer, topology: Topology) -> Iterator[None]:
    """Tell the sanitizer what the ranks of a script declare, meanwhile."""
    sites = CallSites(PLUMBING)

    def declared(value: Any, ranks: tuple[int, ...], name: str) -> None:
        tensors, rank = tensors_in(value), thread_rank()
        if rank is not None and tensors is not None and rank in ranks:
            frames = sites.here().frames
            sanitizer.replicated(rank, ranks, tensors, name=name, frames=frames)

    def by_function(value: Any, group: Any, name: str) -> None:
        if thread_rank() is None:
            return
        if tensors_in(value) is None:
            raise TypeError(
                f"replicated({name!r}): {type(value).__name__} is no tensor; use tensors, numbers, "
                "or lists, tuples and dicts of them"
            )
        declared(value, ranks_of(group, topology), name)

    with listening(by_function), _from_local(declared):
        yield


@contextlib.contextmanager
def _from_local(declared: Callable[[Any, tuple[int, ...], str], None]) -> Iterator[None]:
    """Hear of each `DTensor.from_local`: it takes Replicate() on trust."""
    kind: Any = dtensor.DTensor
    original = kind.from_local

    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        made = original(local_tensor, device_mesh, placements, **options)
        # With run_check, torch broadcasts the value.
        if thread_rank() is not None and not options.get("run_check", False):
            mesh = made.device_mesh
            if mesh.get_coordinate() is not None:
                for dim, placement in enumerate(made.placements):
                    if placement.is_replicate():
                        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(dim)))
                        declared(local_tensor, ranks, "DTensor.from_local")
        return made

    kind.from_local = staticmethod(from_local)
    try:
        yield
    finally:
        kind.from_local = staticmethod(original)

"""Installs folded groups into torch.distributed for the life of a world.

Whatever backend a program asks for ("gloo", "nccl", a device map), a rank of a folded world gets
a folded group; the program is told that it got what it asked for. Threads that are no ranks are
not affected.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .baton import thread_rank
from .errors import NotAMember
from .fabric import Fabric
from .process_group import FoldedProcessGroup
from .store import FoldedStore
from .work import CollectedFuture

BACKEND = "folded"
"""The backend's name in torch.distributed."""

_rank = threading.local()
_worlds = 0
_originals: dict[str, Any] = {}


def _create(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    factory: Callable[[Any], dist.ProcessGroup] | None = getattr(_rank, "factory", None)
    if factory is None:
        raise RuntimeError("a folded group was asked for outside of a rank; use World.run")
    return factory(options)


def install() -> None:
    """Give ranks folded groups, until `uninstall` is called as often."""
    global _worlds
    _worlds += 1
    if _worlds > 1:
        return
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # Each rank's init_process_group wraps the hook in a prefix "[rankN]: ", once a world.
    _originals["excepthook"] = sys.excepthook
    for name, (module, replacement) in _REPLACEMENTS.items():
        _originals[name] = getattr(module, name)
        setattr(module, name, replacement)
    _isolate_threads(True)


def uninstall() -> None:
    """Restore torch when the last world is closed."""
    global _worlds
    _worlds -= 1
    if _worlds:
        return
    _isolate_threads(False)
    sys.excepthook = _originals.pop("excepthook")
    for name, original in _originals.items():
        setattr(_REPLACEMENTS[name][0], name, original)
    _originals.clear()


def init_rank(
    fabric: Fabric, store: FoldedStore, rank: int, world_size: int, *, default_group: bool
) -> None:
    """Make the default group, on the thread of `rank`, unless the program is to make it."""
    _rank.factory = _group_factory(fabric, world_size)
    _rank.fabric, _rank.store = fabric, store
    if default_group:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def leave_rank() -> None:
    """Destroy all groups, on the thread of a rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _rank.factory = _rank.fabric = _rank.store = None


def _group_factory(fabric: Fabric, world_size: int) -> Callable[[Any], dist.ProcessGroup]:
    """What makes a rank's groups: c10d's options in, this rank's view of the group out."""

    def create(options: Any) -> FoldedProcessGroup:
        ranks: Iterable[int] = options.global_ranks_in_group or range(world_size)
        group = fabric.group(str(options.group_id), tuple(ranks))
        return FoldedProcessGroup(fabric, group, options.group_rank)

    return create


def launcher_environment(size: int) -> dict[str, Callable[[int], str]]:
    """What a launcher such as torchrun sets for each rank."""
    return {
        "RANK": str,
        "LOCAL_RANK": str,
        "WORLD_SIZE": lambda rank: str(size),
        "LOCAL_WORLD_SIZE": lambda rank: str(size),
        "MASTER_ADDR": lambda rank: "localhost",
        "MASTER_PORT": lambda rank: "0",
    }


def _isolate_threads(on: bool) -> None:
    """Whether C++ finds groups by name for each thread apart (functional collectives do)."""
    c10d_extension: Any = torch._C._distributed_c10d
    c10d_extension._set_thread_isolation_mode(on)


def _make_group(
    size: int, rank: int, ranks: list[int], asked: Any, *rest: Any, **options: Any
) -> Any:
    """Stands for `_new_process_group_helper`: on a rank, any backend is the folded one."""
    make = _originals["_new_process_group_helper"]
    if thread_rank() is None:
        return make(size, rank, ranks, asked, *rest, **options)
    for name in ("backend_options", "pg_options", "device_id"):
        if options.get(name) is not None:
            options[name] = None
    made = make(size, rank, ranks, dist.Backend(BACKEND), *rest, **options)
    if isinstance(made[0], dist.ProcessGroup):
        c10d._world.pg_map[made[0]] = (dist.Backend(str(asked)), made[1])
    return made


def _refuse(op_name: str) -> None:
    """Stands for `_warn_not_in_group`, after which torch would skip the call on this rank."""
    if thread_rank() is None:
        _originals["_warn_not_in_group"](op_name)
        return
    fabric: Fabric = _rank.fabric
    fabric.fail(
        NotAMember(
            f"rank {thread_rank()} called {op_name} at {fabric.sites.here()} on a group that it "
            "is not in; torch would only warn, and skip the call on this rank"
        )
    )


def _rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Stands for `rendezvous`: the ranks of a world have met already, and share a store."""
    if thread_rank() is None:
        yield from _originals["rendezvous"](url, rank, world_size, **options)
        return
    size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    yield _rank.store, int(os.environ["RANK"]) if rank < 0 else rank, size


def _collect_all(futures: Sequence[Any]) -> Any:
    """Stands for `torch.futures.collect_all`, whose wait would stop all ranks."""
    if thread_rank() is None:
        return _originals["collect_all"](futures)
    return CollectedFuture(futures)


def _wait_all(futures: Sequence[Any]) -> list[Any]:
    """Stands for `torch.futures.wait_all`, likewise."""
    if thread_rank() is None:
        waited: list[Any] = _originals["wait_all"](futures)
        return waited
    return [future.wait() for future in futures]


_REPLACEMENTS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "_new_process_group_helper": (c10d, _make_group),
    "_warn_not_in_group": (c10d, _refuse),
    "rendezvous": (c10d, _rendezvous),
    "collect_all": (torch.futures, _collect_all),
    "wait_all": (torch.futures, _wait_all),
}

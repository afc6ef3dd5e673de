"""State that is global to a process but belongs to one rank.

Real ranks are processes, so libraries keep a rank's state in module globals. Folded ranks share
one process; since only one runs at a time, that state can be swapped at each hand-over. What is
swapped is declared here, entry by entry with its reason.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_MISSING = object()


@dataclass(frozen=True)
class RankLocal:
    """Names of a module, or of a class in it, whose values belong to one rank.

    On a new rank a dict, list or set starts empty; anything else starts as it is when the world
    starts, unless `fresh` makes it.
    """

    module: str
    """A module's name, or "module:Class" for class attributes."""
    names: tuple[str, ...]
    """The names to swap; a name that the installed version lacks is passed over."""
    reason: str
    """Why the state belongs to a rank."""
    fresh: Callable[[], Any] | None = None
    """Makes a new rank's value."""


@dataclass(frozen=True)
class RankCache:
    """A `functools.lru_cache` whose results depend on the rank or the world: cleared when the
    baton changes hands, since a cache has no contents that could be swapped."""

    module: str
    name: str
    reason: str


@dataclass(frozen=True)
class RankSlot:
    """State behind a getter and a setter, such as a random generator's."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    reason: str


Entry = RankLocal | RankCache | RankSlot


def _set_default_dtype(dtype: torch.dtype) -> None:
    if dtype is not torch.get_default_dtype():
        torch.set_default_dtype(dtype)


def _new_c10d_world() -> Any:
    return type(torch.distributed.distributed_c10d._world)()


TORCH_STATE: tuple[Entry, ...] = (
    RankLocal(
        "torch.distributed.distributed_c10d",
        ("_world",),
        "the default group and the coalescing state of this rank",
        fresh=_new_c10d_world,
    ),
    RankLocal(
        "torch.distributed.distributed_c10d",
        (
            "_pg_map",
            "_pg_names",
            "_pg_group_ranks",
            "_pg_backend_config",
            "_group_count",
            "_tags_to_pg",
            "_pg_to_tag",
            "_backend",
            "_default_pg_init_method",
        ),
        "the process groups this rank has made",
    ),
    RankSlot(
        "torch default generator",
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        "each rank draws its own random numbers from its own seed",
    ),
    RankSlot(
        "torch default dtype",
        torch.get_default_dtype,
        _set_default_dtype,
        "a rank may build a model under another default dtype",
    ),
)
"""The rank-local state of torch itself; a world always has it."""


class StateSwap:
    """Saves and restores the declared state of each rank, and of the caller outside of them.

    Invariant: between `load(r)` and the next `save(r)` the process holds the state of r.

    This runs at every hand-over, so the names of a module are read and written in one go.

    Args:
        entries: the table.
        environment: environment variables that a launcher sets, each with its value on a rank.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        environment: Mapping[str, Callable[[int], str]] | None = None,
    ) -> None:
        entries = tuple(entries)
        self._modules: dict[str, tuple[dict[str, Any], list[str]]] = {}
        self._attributes: list[tuple[type, str]] = []
        self._fresh: dict[tuple[str, str], Callable[[], Any]] = {}
        self._slots = [entry for entry in entries if isinstance(entry, RankSlot)]
        self._caches: list[Callable[[], None]] = []
        self._saved: dict[int | None, _Saved] = {}
        self._outside: dict[str, str | None] = {}
        self._raw: dict[int, dict[bytes, bytes]] = {}
        self._environment = dict(environment or {})
        for entry in entries:
            if isinstance(entry, RankCache):
                cache = getattr(_owner(entry.module), entry.name, None)
                if cache is not None:
                    self._caches.append(cache.cache_clear)
            elif isinstance(entry, RankLocal):
                self._add(entry)

    def _add(self, entry: RankLocal) -> None:
        owner = _owner(entry.module)
        names = [name for name in entry.names if hasattr(owner, name)]
        if isinstance(owner, type):
            self._attributes += [(owner, name) for name in names]
        else:
            self._modules.setdefault(entry.module, (vars(owner), []))[1].extend(names)
        if entry.fresh is not None:
            self._fresh.update({(entry.module, name): entry.fresh for name in names})

    def new_rank(self, rank: int) -> None:
        """Give `rank` fresh state, made from what the process holds now."""
        self.save(rank)
        saved = self._saved[rank]
        for module, values in zip(self._modules, saved.modules, strict=True):
            for name, value in values.items():
                fresh = self._fresh.get((module, name))
                values[name] = _emptied(value) if fresh is None else fresh()
        for i, (owner, name) in enumerate(self._attributes):
            fresh = self._fresh.get((f"{owner.__module__}:{owner.__qualname__}", name))
            value = saved.attributes[i]
            saved.attributes[i] = _emptied(value) if fresh is None else fresh()

    def save(self, rank: int | None) -> None:
        """Remember what the process holds as the state of `rank` (None: the caller)."""
        self._saved[rank] = _Saved(
            [_values(table, names) for table, names in self._modules.values()],
            [vars(owner).get(name, _MISSING) for owner, name in self._attributes],
            [slot.get() for slot in self._slots],
        )
        if rank is None:
            self._outside = {name: os.environ.get(name) for name in self._environment}

    def load(self, rank: int | None) -> None:
        """Put the state of `rank` (None: the caller) in place, and drop rank-dependent caches."""
        saved = self._saved[rank]
        for (table, names), values in zip(self._modules.values(), saved.modules, strict=True):
            table.update(values)
            if len(values) < len(names):
                for name in set(names) - set(values):
                    table.pop(name, None)
        for (owner, name), value in zip(self._attributes, saved.attributes, strict=True):
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        for slot, value in zip(self._slots, saved.slots, strict=True):
            slot.set(value)
        for clear in self._caches:
            clear()
        if rank is None or _raw_environment is None:
            self._set_environment(rank)
        else:
            _raw_environment.update(self._raw_environment_of(rank))

    def _raw_environment_of(self, rank: int) -> dict[bytes, bytes]:
        raw = self._raw.get(rank)
        if raw is None:
            raw = {n.encode(): value(rank).encode() for n, value in self._environment.items()}
            self._raw[rank] = raw
        return raw

    def _set_environment(self, rank: int | None) -> None:
        for name, of_rank in self._environment.items():
            value = self._outside.get(name) if rank is None else of_rank(rank)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _values(table: dict[str, Any], names: list[str]) -> dict[str, Any]:
    try:
        return {name: table[name] for name in names}
    except KeyError:
        return {name: table[name] for name in names if name in table}


def _emptied(value: Any) -> Any:
    """A container of the same type and settings without its contents; any other value as it is."""
    if not isinstance(value, dict | list | set):
        return value
    empty = copy.copy(value)
    empty.clear()
    return empty


class _Saved(NamedTuple):
    """One rank's state; what lacks a name had it deleted."""

    modules: list[dict[str, Any]]
    attributes: list[Any]
    slots: list[Any]


# What `os.environ` reads. Writing through `os.environ` also calls C's putenv, which would cost
# as much as the rest of a hand-over; only code in C that reads the rank would see a difference.
_raw_environment: dict[bytes, bytes] | None = (
    getattr(os.environ, "_data", None) if os.name == "posix" else None
)


def _owner(path: str) -> Any:
    module, _, cls = path.partition(":")
    owner: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in filter(None, cls.split(".")):
        owner = getattr(owner, part)
    return owner

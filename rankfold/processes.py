"""Ranks as processes over real groups, for the commands that take `--transport gloo`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from model.rank_state import RANK_LOCAL
from model.subject import prepare
from properties.faults import find
from rankfold.run import PLUMBING
from sim import Topology
from sim.gloo import GlooPool, GlooWorld
from sim.gloo.pool import Pool


class RankProcesses:
    """A pool of processes that have imported vLLM, and the fault that is switched on in them."""

    def __init__(self, pool: Pool, *, fault: str | None = None) -> None:
        self.pool = pool
        self._within: Callable[[], AbstractContextManager[None]] | None = None
        if fault is not None:
            find(fault)
            self._within = functools.partial(_under, fault)

    def world(self, topology: Topology) -> GlooWorld:
        """A world on these processes."""
        return GlooWorld(
            topology,
            pool=self.pool,
            rank_local=RANK_LOCAL,
            plumbing=PLUMBING,
            within=self._within,
        )


def new_pool() -> GlooPool:
    """A pool whose processes have imported vLLM. It starts at once, in the background."""
    return GlooPool(_prepare)


@contextmanager
def rank_processes(fault: str | None = None) -> Iterator[RankProcesses]:
    """Processes of one's own until the end of the block, or those that a launcher has started."""
    if _launched:
        yield LaunchedProcesses(_launched[-1], fault=fault)
        return
    with new_pool() as pool:
        yield RankProcesses(pool, fault=fault)


class LaunchedProcesses(RankProcesses):
    """The ranks of a launcher: there are no others, so they are in one world at a time."""

    _world: GlooWorld | None = None

    def world(self, topology: Topology) -> GlooWorld:
        """A world of all of them. The one before is closed."""
        if self._world is not None:
            self._world.close()
        self._world = super().world(topology)
        return self._world


_launched: list[Pool] = []


@contextmanager
def launched(pool: Pool) -> Iterator[None]:
    """Within, `rank_processes` are those of this pool."""
    _launched.append(pool)
    try:
        yield
    finally:
        _launched.pop()


def are_launched() -> bool:
    """Whether `rank_processes` are those of a launcher."""
    return bool(_launched)


def _prepare() -> None:
    torch.set_num_threads(1)
    # With the overrides of folded ranks: vLLM's shared-memory queue would outlive a rank that is
    # killed, and its operations are to be the same on both transports.
    prepare()


def _under(fault: str) -> AbstractContextManager[None]:
    return find(fault).apply()

"""The rig: worlds and models that are built once and serve many steps.

A search runs thousands of small steps on a few topologies. Making a world and its groups costs
ten steps, building a model two; so both are kept and used again, the least recently used let go.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from model.batch import Batch
from model.provenance import Numbering
from model.rank_state import RANK_LOCAL
from model.subject import StepResult
from properties import Verdict
from properties.parameters import Layout, loaded_once
from properties.poison import poisoned
from properties.sanitizer import Finding, Sanitizer
from rankfold.options import Options
from rankfold.processes import RankProcesses
from rankfold.rank_programs import build_model, drop_model, partial_step, step_model
from rankfold.run import PLUMBING, Outcome, Progress, full_checkpoint
from sim import Schedule, SimError, Topology, World
from sim.gloo import GlooWorld

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Kept(OrderedDict[K, V]):
    """The most recently used values of a function, at most so many."""

    def __init__(self, most: int, let_go: Callable[[V], object] = lambda value: None) -> None:
        super().__init__()
        self._most, self._let_go = most, let_go

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value kept under a key, or made now."""
        if key not in self:
            value = make()
            self[key] = value
            while len(self) > self._most:
                self._let_go(self.popitem(last=False)[1])
        self.move_to_end(key)
        return self[key]

    def drop_all(self) -> None:
        """Let go of everything."""
        while self:
            self._let_go(self.popitem()[1])


Weights = Kept[Any, dict[str, torch.Tensor]]
"""Checkpoints by `Options.weights_key`."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on every rank of a world."""

    number: int
    """Under which the ranks keep it."""
    facts: Mapping[str, Any]
    """Of the last rank's model."""
    parameters: Verdict
    """Whether its parameters were loaded where they belong."""


class Stand:
    """One topology's world, and the models that were built on it."""

    def __init__(
        self, topology: Topology, models: int, processes: RankProcesses | None = None
    ) -> None:
        self.sanitizer = Sanitizer()
        self.world: World | GlooWorld
        if processes is None:
            self.world = World(
                topology, rank_local=RANK_LOCAL, plumbing=PLUMBING, observers=[self.sanitizer]
            )
        else:
            self.world = processes.world(topology)
        self._models: Kept[Any, Built] = Kept(models, self._drop)
        self._parameters: dict[Any, Verdict] = {}
        self._numbers = itertools.count()

    def built(self, options: Options, weights: Mapping[str, torch.Tensor]) -> Built:
        """The model of these options on every rank."""
        return self._models.of(options.model_key, lambda: self._build(options, weights))

    def step(
        self,
        built: Built,
        batch: Batch | Sequence[Batch],
        aux: tuple[int, ...],
        schedule: Schedule,
    ) -> list[StepResult]:
        """Run one step on every rank, under poison. Processes have a schedule of their own."""
        if isinstance(self.world, World):
            with poisoned():
                return self.world.run(
                    step_model, built.number, batch, aux, False, schedule=schedule
                )
        return self.world.run(step_model, built.number, batch, aux, True)

    def partial(self, built: Built) -> list[StepResult]:
        """What the ranks recorded of a step that broke."""
        topology = self.world.topology
        found = self.world.salvage(partial_step, built.number)
        return [
            StepResult(stage=topology.coordinates(rank)["pp"]) if result is None else result
            for rank, result in enumerate(found)
        ]

    @property
    def findings(self) -> tuple[Finding, ...] | None:
        """What the sanitizer found; it cannot see the operands of processes."""
        return tuple(self.sanitizer.findings) if isinstance(self.world, World) else None

    def _build(self, options: Options, weights: Mapping[str, torch.Tensor]) -> Built:
        # Which parameter goes where does not depend on the numbers in it: a look at one model of
        # a layout is enough.
        layout, number = options.layout_key, next(self._numbers)
        known = self._parameters.get(layout)
        numbering = Numbering.of(weights) if known is None else None
        ranks = self.world.run(build_model, number, options, weights, numbering)
        if known is None:
            assert numbering is not None
            known = self._parameters[layout] = loaded_once(
                Layout(
                    topology=options.topology,
                    kv_heads=options.tiny.num_key_value_heads,
                    whole_shared_experts=options.mega,
                ),
                numbering,
                [rank.loaded for rank in ranks if rank.loaded is not None],
            )
        return Built(number=number, facts=ranks[-1].facts, parameters=known)

    def _drop(self, built: Built) -> None:
        self.world.run(drop_model, built.number)

    def close(self) -> None:
        """End the world's ranks, and with them the models."""
        self._models.clear()
        self.world.close()


class Rig:
    """Runs steps on worlds, and keeps the worlds and models for the next ones.

    A change to the code under test (a fault) needs a rig of its own: models that were built before
    it would hide it.
    """

    def __init__(
        self,
        *,
        worlds: int | None = None,
        models: int = 16,
        weights: Weights | None = None,
        processes: RankProcesses | None = None,
    ) -> None:
        """Keep at most so many worlds, and on each of them so many models.

        worlds: 24 by default, or 3 of processes, since each has processes of its own.
        weights: checkpoints that were made already; new ones are added.
        processes: what the ranks are; folded by default.
        """
        # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
        torch.set_num_threads(1)
        self._models, self._processes = models, processes
        if worlds is None:
            worlds = 24 if processes is None else 3
        self._stands: Kept[str, Stand] = Kept(worlds, Stand.close)
        self._weights: Weights = Kept(models) if weights is None else weights

    def weights(self, options: Options) -> dict[str, torch.Tensor]:
        """The full checkpoint that all ranks load their parts of."""
        return self._weights.of(options.weights_key, lambda: full_checkpoint(options))

    def step(
        self,
        options: Options,
        batch: Batch | Sequence[Batch],
        progress: Progress = lambda text: None,
        schedule: Schedule | None = None,
        worker: str = "",
    ) -> Outcome:
        """Run one step on every rank, under poison, with all that the sanitizer found in it.

        Args:
            options: the model and its topology.
            batch: the same for all ranks, or one for each DP rank.
            progress: told what is being done.
            schedule: of the step; the plain one by default.
            worker: which of several worlds of the topology; each has a name.

        Raises:
            SimError: the ranks broke while the model was built. A step that breaks is in the
                outcome.
        """
        topology = options.topology
        broke: SimError | None = None
        results: Sequence[StepResult]
        try:
            stand, built = self._built(options, worker, progress)
            stand.world.ledger.clear()
            stand.sanitizer.clear()
            progress(f"running {topology}")
            try:
                results = stand.step(built, batch, options.aux, schedule or Schedule())
            except SimError as error:
                broke = error
                results = stand.partial(built)
        except BaseException:
            self._discard(topology, worker)
            raise
        if broke is not None:
            self._discard(topology, worker)
        return Outcome(
            topology=topology,
            results=list(results),
            ledger=stand.world.ledger.copy(),
            facts=built.facts,
            broke=broke,
            findings=stand.findings,
            parameters=built.parameters,
        )

    def call(
        self, options: Options, program: Callable[..., T], *arguments: Any, worker: str = ""
    ) -> list[T]:
        """Run a program of `rank_programs` on a model of every rank, and return what each says.

        Raises:
            SimError: the ranks broke.
        """
        try:
            stand, built = self._built(options, worker, lambda text: None)
            return list(stand.world.run(program, built.number, *arguments))
        except BaseException:
            self._discard(options.topology, worker)
            raise

    def _built(self, options: Options, worker: str, progress: Progress) -> tuple[Stand, Built]:
        """A world with the model of these options."""
        topology = options.topology
        name = f"{topology.word} {worker}"
        if name not in self._stands:
            kind = "folded ranks" if self._processes is None else "processes over gloo"
            progress(f"building {topology} on {topology.world_size} {kind}")
        stand = self._stands.of(name, lambda: Stand(topology, self._models, self._processes))
        return stand, stand.built(options, self.weights(options))

    def _discard(self, topology: Topology, worker: str) -> None:
        """Let go of a world that broke: it can only be closed."""
        stand = self._stands.pop(f"{topology.word} {worker}", None)
        if stand is not None:
            stand.close()

    def close(self) -> None:
        """End all worlds."""
        self._stands.drop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

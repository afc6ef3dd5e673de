"""The rig: worlds and models that are built once and serve many steps.

A search runs thousands of small steps on a few topologies. Making a world and its groups costs
ten steps, building a model two; so both are kept and used again, the least recently used let go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from model.batch import Batch
from model.facts import facts
from model.provenance import Numbering
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject
from properties import Verdict
from properties.parameters import Layout, loaded_once
from properties.poison import poisoned
from properties.sanitizer import Sanitizer
from rankfold.options import Options
from rankfold.run import PLUMBING, Outcome, Progress, build, full_checkpoint
from sim import Schedule, SimError, Topology, World

K = TypeVar("K")
V = TypeVar("V")


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


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on every rank of a world."""

    subjects: list[Subject]
    parameters: Verdict
    """Whether its parameters were loaded where they belong."""


class Stand:
    """One topology's world, and the models that were built on it."""

    def __init__(self, topology: Topology, models: int) -> None:
        self.sanitizer = Sanitizer()
        self.world = World(
            topology, rank_local=RANK_LOCAL, plumbing=PLUMBING, observers=[self.sanitizer]
        )
        self._models: Kept[Any, Built] = Kept(models)
        self._parameters: dict[Any, Verdict] = {}

    def built(self, options: Options, weights: Mapping[str, torch.Tensor]) -> Built:
        """The model of these options on every rank."""
        return self._models.of(options.model_key, lambda: self._build(options, weights))

    def _build(self, options: Options, weights: Mapping[str, torch.Tensor]) -> Built:
        # Which parameter goes where does not depend on the numbers in it: a look at one model of
        # a layout is enough.
        layout = options.layout_key
        if layout in self._parameters:
            subjects = self.world.run(build, options, weights)
            return Built(subjects=subjects, parameters=self._parameters[layout])
        numbering = Numbering.of(weights)
        subjects = self.world.run(build, options, weights, numbering)
        verdict = loaded_once(
            Layout(
                topology=options.topology,
                kv_heads=options.tiny.num_key_value_heads,
                whole_shared_experts=options.mega,
            ),
            numbering,
            [subject.loaded for subject in subjects if subject.loaded is not None],
        )
        self._parameters[layout] = verdict
        return Built(subjects=subjects, parameters=verdict)

    def close(self) -> None:
        """End the world's ranks."""
        self._models.drop_all()
        self.world.close()


class Rig:
    """Runs steps on folded worlds, and keeps the worlds and models for the next ones.

    A change to the code under test (a fault) needs a rig of its own: models that were built before
    it would hide it.
    """

    def __init__(self, *, worlds: int = 24, models: int = 64) -> None:
        """Keep at most so many worlds, and on each of them so many models."""
        # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
        torch.set_num_threads(1)
        self._models = models
        self._stands: Kept[str, Stand] = Kept(worlds, Stand.close)
        self._weights: Kept[Any, dict[str, torch.Tensor]] = Kept(models)

    def weights(self, options: Options) -> dict[str, torch.Tensor]:
        """The full checkpoint that all ranks load their parts of."""
        return self._weights.of(options.weights_key, lambda: full_checkpoint(options))

    def step(
        self,
        options: Options,
        batch: Batch,
        progress: Progress = lambda text: None,
        schedule: Schedule | None = None,
    ) -> Outcome:
        """Run one step on every rank, under poison, with all that the sanitizer found in it.

        Args:
            options: the model and its topology.
            batch: the same for all ranks.
            progress: told what is being done.
            schedule: of the step; the plain one by default.

        Raises:
            SimError: the ranks broke while the model was built. A step that breaks is in the
                outcome.
        """
        topology, weights = options.topology, self.weights(options)
        if topology.word not in self._stands:
            progress(f"building {topology} on {topology.world_size} folded ranks")
        stand = self._stands.of(topology.word, lambda: Stand(topology, self._models))
        world = stand.world
        broke: SimError | None = None
        results: Sequence[StepResult]
        try:
            built = stand.built(options, weights)
            subjects = built.subjects
            world.ledger.clear()
            stand.sanitizer.clear()
            progress(f"running {topology}")
            try:
                with poisoned():
                    results = world.run(
                        _step, subjects, batch, options.aux, schedule=schedule or Schedule()
                    )
            except SimError as error:
                broke = error
                results = [subject.partial_result() for subject in subjects]
        except BaseException:
            self._discard(topology)
            raise
        if broke is not None:
            self._discard(topology)
        return Outcome(
            topology=topology,
            results=list(results),
            ledger=world.ledger,
            facts=facts(subjects[-1].model),
            broke=broke,
            findings=tuple(stand.sanitizer.findings),
            parameters=built.parameters,
        )

    def _discard(self, topology: Topology) -> None:
        """Let go of a world that broke: it can only be closed."""
        stand = self._stands.pop(topology.word, None)
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


def _step(ctx: Any, subjects: Sequence[Subject], batch: Batch, aux: tuple[int, ...]) -> StepResult:
    subject = subjects[ctx.rank]
    subject.capture_aux(aux)
    return subject.step(batch)

"""A worker: one world, with a lane for each of its DP ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from model.handover.layout import Held
from rankfold.data_parallel import view
from rankfold.deployment.lane import Course, Lane
from rankfold.options import Options
from rankfold.rank_programs import free_request, held_caches
from rankfold.rig import Rig
from rankfold.run import Outcome, Progress
from rankfold.serving.sampling import Sampling
from sim import Schedule

T = TypeVar("T")


class Worker:
    """One world of a deployment."""

    def __init__(
        self, rig: Rig, options: Options, side: str, number: int, prefix: str = ""
    ) -> None:
        """A worker of a rig.

        prefix: of the name of its world, where several deployments share a rig.
        """
        self.side, self.number, self.options = side, number, options
        self.lanes = [Lane(side, number, dp_rank) for dp_rank in range(options.topology.dp)]
        self.outcomes: list[Outcome] = []
        """Of its steps, with all ranks."""
        self._rig, self._world = rig, f"{prefix}{side}{number}"
        self._held: list[tuple[Held, ...]] | None = None

    @property
    def name(self) -> str:
        """Such as "prefill2"."""
        return f"{self.side}{self.number}"

    @property
    def idle(self) -> bool:
        """Whether no lane has anything to run."""
        return all(lane.idle for lane in self.lanes)

    def step(
        self,
        sampling: Sampling,
        chunk: int,
        progress: Progress,
        schedule: Schedule | None = None,
    ) -> bool:
        """Run what is next on all lanes together; False if it broke or lost rows."""
        batches = tuple(lane.next_batch(chunk) for lane in self.lanes)
        outcome = self._rig.step(self.options, batches, progress, schedule, self._world)
        self.outcomes.append(outcome)
        one = len(self.lanes) == 1
        came = [
            lane.came(outcome if one else view(outcome, lane.dp_rank), sampling)
            for lane in self.lanes
        ]
        return all(came) and outcome.broke is None

    def call(self, program: Callable[..., T], *arguments: Any) -> list[T]:
        """Run a program of `rank_programs` on its ranks."""
        return self._rig.call(self.options, program, *arguments, worker=self._world)

    def free(self, lane: Lane, course: Course) -> None:
        """Give up a course's caches and its slot."""
        self.call(free_request, lane.dp_rank, course.slot)
        lane.leave(course)

    def held_by(self, lane: Lane) -> dict[int, tuple[Held, ...]]:
        """What the caches of a lane's ranks hold; the ranks are asked once."""
        if self._held is None:
            self._held = self.call(held_caches)
        topology = self.options.topology
        return {
            rank: held
            for rank, held in enumerate(self._held)
            if topology.coordinates(rank)["dp"] == lane.dp_rank
        }

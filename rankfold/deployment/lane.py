"""One DP rank of one worker: the requests it has, the batches it makes, and what came out."""

from __future__ import annotations

from dataclasses import dataclass

from model.batch import Batch
from rankfold.options import MOST_REQUESTS
from rankfold.run import Outcome
from rankfold.serving.drive import Record, batch_of_step, take_step
from rankfold.serving.plan import Step, next_step
from rankfold.serving.sampling import Sampling


@dataclass(kw_only=True, eq=False)
class Course(Record):
    """One run of a request on one side: its prefill, its decoding, or both.

    A request whose hand-over was given up is prefilled again, in another course.
    """

    number: int
    """Of all courses of the side."""
    attempt: int
    fed: int = 0
    """Tokens that the caches hold."""
    ready: bool = True
    """Whether it may run: not before its caches are there."""
    slot: int = 0

    @property
    def done(self) -> bool:
        """Whether all was fed."""
        return self.fed >= self.goal

    def __str__(self) -> str:
        again = f" (attempt {self.attempt + 1})" if self.attempt else ""
        return f"request {self.request}{again}"


class Lane:
    """One DP rank of one worker."""

    def __init__(self, side: str, worker: int, dp_rank: int) -> None:
        self.side, self.worker, self.dp_rank = side, worker, dp_rank
        self.steps: list[Step] = []
        self.batches: list[Batch] = []
        self.outcomes: list[Outcome] = []
        self._slots: list[Course | None] = [None] * MOST_REQUESTS
        self._running: dict[int, Course] = {}
        """What the last batch is of, by number."""

    @property
    def name(self) -> str:
        """Such as "decode0.dp3"."""
        return f"{self.side}{self.worker}.dp{self.dp_rank}"

    @property
    def courses(self) -> list[Course]:
        """What it has."""
        return [course for course in self._slots if course is not None]

    @property
    def load(self) -> int:
        """Tokens that it has to run and to hold: what a router looks at."""
        return sum(course.goal for course in self.courses)

    @property
    def free(self) -> bool:
        """Whether it can take another course."""
        return None in self._slots

    def take(self, course: Course) -> None:
        """Give a course a slot of the caches."""
        slot = self._slots.index(None)
        self._slots[slot] = course
        course.slot = slot

    def leave(self, course: Course) -> None:
        """Give its slot up."""
        self._slots[course.slot] = None

    @property
    def idle(self) -> bool:
        """Whether it has nothing to run."""
        return not any(course.ready and not course.done for course in self.courses)

    def next_batch(self, chunk: int) -> Batch:
        """The batch of the next step: what is next of each course, as long as there is room.

        chunk: most prompt tokens of a course in a step; 0 for no limit.
        """
        running = {c.number: c for c in self.courses if c.ready and not c.done}
        self._running = running
        fed = [(number, c.fed, c.prompt, c.goal) for number, c in running.items()]
        step = next_step(fed, chunk)
        if not step.parts:
            return Batch.of([], [0])
        batch = batch_of_step(step, running, {number: c.slot for number, c in running.items()})
        self.steps.append(step)
        self.batches.append(batch)
        return batch

    def came(self, outcome: Outcome, sampling: Sampling) -> bool:
        """Take what came of the last batch; False if it broke or lost rows."""
        if not self._running:
            return outcome.broke is None
        self.outcomes.append(outcome)
        step = self.steps[-1]
        if outcome.broke is not None or not take_step(step, outcome, self._running, sampling):
            return False
        for part in step.parts:
            self._running[part.request].fed = part.end
        return True

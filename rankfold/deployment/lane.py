"""One DP rank of one worker: the requests it has, the batches it makes, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field

from model.batch import Batch
from rankfold.options import MOST_REQUESTS, MOST_TOKENS
from rankfold.run import Outcome
from rankfold.serving.plan import Part, Step
from rankfold.serving.request import Request
from rankfold.serving.sampling import Sampling


@dataclass(kw_only=True, eq=False)
class Course:
    """One run of a request on one side: its prefill, its decoding, or both.

    A request whose hand-over was given up is prefilled again, in another course.
    """

    number: int
    """Of all courses of the side."""
    request: int
    attempt: int
    prompt: int
    """Tokens of its prompt."""
    tokens: list[int]
    """What is fed: the prompt, and what follows as it is sampled."""
    goal: int
    """Tokens that are fed in all."""
    fed: int = 0
    """Tokens that the caches hold."""
    sampled: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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


def course_of(request: Request, number: int, index: int, attempt: int, goal: int) -> Course:
    """A course of a request, at its beginning."""
    prompt = len(request.prompt)
    return Course(
        number=number,
        request=index,
        attempt=attempt,
        prompt=prompt,
        tokens=list(request.prompt),
        goal=goal,
    )


class Lane:
    """One DP rank of one worker."""

    def __init__(self, side: str, worker: int, dp_rank: int, *, slots: int = MOST_REQUESTS) -> None:
        self.side, self.worker, self.dp_rank = side, worker, dp_rank
        self.steps: list[Step] = []
        self.batches: list[Batch] = []
        self.outcomes: list[Outcome] = []
        self._slots: list[Course | None] = [None] * slots
        self._step: tuple[Course, ...] = ()

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
        room = MOST_TOKENS
        parts: list[tuple[Part, Course]] = []
        for course in self.courses:
            if not course.ready or course.done:
                continue
            left = course.prompt - course.fed
            next_ = min(left, chunk or left) if left > 0 else 1
            if (length := min(next_, room)) > 0:
                part = Part(request=course.number, start=course.fed, length=length)
                parts.append((part, course))
                room -= length
        # As vLLM orders a batch: those of one token first.
        parts.sort(key=lambda pair: pair[0].length != 1)
        self._step = tuple(course for _, course in parts)
        if not parts:
            return Batch.of([], [0])
        self.steps.append(Step(parts=tuple(part for part, _ in parts)))
        batch = Batch.of(
            [t for part, course in parts for t in course.tokens[part.start : part.end]],
            [part.length for part, _ in parts],
            context_lens=[part.start for part, _ in parts],
            requests=[course.slot for _, course in parts],
        )
        self.batches.append(batch)
        return batch

    def came(self, outcome: Outcome, sampling: Sampling) -> bool:
        """Take what came of the last batch; False if it broke or lost rows."""
        if not self._step:
            return outcome.broke is None
        self.outcomes.append(outcome)
        if outcome.broke is not None:
            return False
        of_ranks = [r for r in outcome.results if r.logits is not None and r.logprobs is not None]
        step, logits, logprobs = self.steps[-1], of_ranks[0].logits, of_ranks[0].logprobs
        assert logits is not None and logprobs is not None
        if logits.shape[0] < step.tokens:
            # A fault has lost rows; without them there is no next token.
            return False
        end = 0
        for part, course in zip(step.parts, self._step, strict=True):
            start, end = end, end + part.length
            course.fed = part.end
            for row, position in zip(range(start, end), range(part.start, part.end), strict=True):
                if position + 1 < course.prompt:
                    value = float(logprobs[row, course.tokens[position + 1]])
                    course.prompt_logprobs.append(value)
            if part.end >= course.prompt:
                count = len(course.sampled)
                token = sampling.sample(course.request, count, logits[end - 1])
                course.sampled.append(token)
                course.logprobs.append(float(logprobs[end - 1, token]))
                if len(course.tokens) < course.goal:
                    course.tokens.append(token)
        return True

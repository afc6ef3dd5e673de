"""One worker's search: Hypothesis draws examples, the examiner judges them, Hypothesis shrinks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, seed

from properties import Verdict
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.hunt.space import Space, quietly
from rankfold.hunt.tally import Tally
from rankfold.judge import Judgement
from sim import Topology

ROUND = 400
"""Most examples of one Hypothesis run; the clock is looked at after each example."""
SHRINK_SECONDS = 15.0
"""After this long the smallest failing example so far is taken."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An example that fails."""

    example: Example
    verdict: Verdict
    """The headline."""
    found_after: float
    """Seconds of the search until the first failing example, before it was shrunk."""
    tried: int
    """Examples until then."""


@dataclass(kw_only=True)
class Budget:
    """How long a search goes on: so many seconds, or so many examples."""

    seconds: float | None
    examples: int | None
    stopped: Callable[[], bool] = lambda: False
    """Whether somebody else wants the search to end."""
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def spent(self, done: int) -> bool:
        """Whether to stop after so many examples."""
        late = self.seconds is not None and self.elapsed >= self.seconds
        enough = self.examples is not None and done >= self.examples
        return late or enough or self.stopped()


def extent(example: Example) -> tuple[int, int, int, str]:
    """How large an example is: ranks, tokens, layers."""
    ranks = Topology.parse(example.topology).world_size
    return ranks, example.tokens, len(example.layers), str(example)


def same_fault(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts say the same kind of thing, by the same check."""
    return (one.name, one.kind) == (other.name, other.kind)


class Wrong(AssertionError):
    """An example fails. Hypothesis takes failures of one class for the same one, so each check and
    kind of fault has a class of its own: shrinking does not slip from one fault to another."""

    _classes: dict[tuple[str, str], type[Wrong]] = {}  # noqa: RUF012  (one for all classes)

    @classmethod
    def of(cls, verdict: Verdict) -> Wrong:
        """The failure that this verdict is."""
        key = (verdict.name, verdict.kind)
        made = cls._classes.setdefault(key, type("Wrong", (cls,), {}))
        return made(verdict.what)


def search(
    space: Space,
    number: int,
    budget: Budget,
    examiner: Examiner,
    tally: Tally,
    tick: Callable[[], None] = lambda: None,
    first: Sequence[Example] = (),
    found: Callable[[], None] = lambda: None,
) -> Failure | None:
    """Draw and examine examples until one fails or the budget is spent; then shrink it.

    Args:
        space: what to draw.
        number: the seed; the same number draws the same examples.
        budget: when to stop.
        examiner: judges the examples.
        tally: counts them.
        tick: called after each example.
        first: examples to begin with.
        found: called as soon as an example fails, before it is shrunk.
    """
    rounds = 0
    for example in first:
        if budget.spent(tally.examples):
            return None
        hunter = _Round(budget, examiner, tally, tick, found)
        if (verdict := hunter.examine(example)) is not None:
            return _smaller(
                space, hunter.failure(example, verdict), random.Random(number), examiner
            )
    while not budget.spent(tally.examples):
        chance = random.Random(number * 1_000_003 + rounds)
        most = ROUND
        if budget.examples is not None:
            most = min(ROUND, budget.examples - tally.examples)
        before = tally.examples
        hunter = _Round(budget, examiner, tally, tick, found)
        failure = hunter.run(space.some(chance), chance.getrandbits(32), most)
        if failure is not None:
            return _smaller(space, failure, chance, examiner)
        rounds += 1
        if tally.examples == before:
            break
    return None


def _smaller(space: Space, failure: Failure, chance: random.Random, examiner: Examiner) -> Failure:
    """The same failure in an example that is smaller in any dimension."""
    budget = Budget(seconds=SHRINK_SECONDS, examples=None)
    hunter = _Round(budget, examiner, Tally(), only=failure.verdict)
    found = hunter.run(space.below(failure.example), chance.getrandbits(32), ROUND)
    if found is None or extent(found.example) >= extent(failure.example):
        return failure
    return replace(failure, example=found.example, verdict=found.verdict)


def warm_up(space: Space) -> None:
    """Draw an example of a space and drop it. What Hypothesis finds out once in a process, before
    it draws, takes as long as many examples; workers that are forked afterwards share it."""

    @quietly(1, Phase.generate)
    @given(space.examples())
    def probe(example: Example) -> None:
        del example

    probe()


class _Round:
    """One run of Hypothesis."""

    def __init__(
        self,
        budget: Budget,
        examiner: Examiner,
        tally: Tally,
        tick: Callable[[], None] = lambda: None,
        found: Callable[[], None] = lambda: None,
        only: Verdict | None = None,
    ) -> None:
        self._only = only
        """The failure to look for; any by default."""
        self._tell = found
        self._budget, self._examiner, self._tally, self._tick = budget, examiner, tally, tick
        self._judged: dict[Example, Verdict | None] = {}
        """The headlines of all examples since the first failure, so that shrinking can end."""
        self._found: tuple[float, int] | None = None
        self._last: tuple[Example, Verdict] | None = None

    def run(self, space: Space, number: int, most: int) -> Failure | None:
        """Draw at most so many examples; returns the shrunk failure, if there is one."""

        @seed(number)
        @quietly(most, Phase.generate, Phase.shrink)
        @given(space.examples())
        def probe(example: Example) -> None:
            verdict = self.examine(example)
            if verdict is not None:
                self._last = (example, verdict)
                raise Wrong.of(verdict)

        try:
            probe()
        except Wrong:
            assert self._last is not None
            return self.failure(*self._last)
        return None

    def failure(self, example: Example, verdict: Verdict) -> Failure:
        """The failure of an example that was examined, with when the first one was found."""
        assert self._found is not None
        after, tried = self._found
        return Failure(example=example, verdict=verdict, found_after=after, tried=tried)

    def examine(self, example: Example) -> Verdict | None:
        """The headline of an example; None if it holds, or if there is no time left to look."""
        if example in self._judged:
            return self._judged[example]
        if self._found is not None:
            if self._budget.elapsed - self._found[0] > SHRINK_SECONDS:
                return None
        elif self._budget.spent(self._tally.examples):
            return None
        judgement = self._examiner.examine(example)
        self._count(example, judgement)
        verdict = judgement.headline
        if verdict and self._only and not same_fault(verdict, self._only):
            verdict = None
        if verdict is not None and self._found is None:
            self._found = (self._budget.elapsed, self._tally.examples)
            self._tell()
        if self._found is not None:
            self._judged[example] = verdict
        return verdict

    def _count(self, example: Example, judgement: Judgement) -> None:
        if self._found is None:
            self._tally.add(example, {known.name for known in judgement.known.values()})
            self._tick()

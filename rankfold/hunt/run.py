"""`rankfold hunt`: the search and the exhaustive run, with workers, progress and replay files."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model.subject import check, prepare
from properties.faults import find
from rankfold.errors import UsageError
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.hunt.exhaustive import Scope, run_block
from rankfold.hunt.report import HuntReport
from rankfold.hunt.resume import Done
from rankfold.hunt.search import Budget, Failure, extent, search, warm_up
from rankfold.hunt.space import Space
from rankfold.hunt.tally import Tally
from rankfold.hunt.workers import Link, default_workers, run_workers
from rankfold.options import TRANSPORTS, Options, one_dp_rank
from rankfold.processes import rank_processes
from rankfold.replay import Expected, Replay
from sim import Topology

SECONDS = 60.0
"""Length of a hunt that has no budget."""
TELL = 0.2
"""Seconds between two messages of a worker about what it has drawn."""
FOUND = "found"
"""What a worker says once an example fails, before it has shrunk it."""
DIRECTORY = Path(".rankfold")
"""Where replay files and progress go, in the current directory."""


@dataclass(frozen=True, kw_only=True)
class HuntOptions:
    """What to hunt for, and how long."""

    topologies: tuple[Topology, ...] = ()
    only: tuple[str, ...] = ()
    """Dimensions that are held to one value, as in "dtype=bfloat16"."""
    seconds: float | None = None
    examples: int | None = None
    seed: int = 0
    workers: int = field(default_factory=default_workers)
    fault: str | None = None
    """A fault to switch on, to see that the hunt finds it."""
    exhaustive: bool = False
    state: Path | None = None
    """Progress of an exhaustive hunt."""
    directory: Path = DIRECTORY
    transport: str = "folded"
    """What the ranks are: threads of a worker in turns, or processes over gloo."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UsageError(f"--transport {self.transport!r}: use {', '.join(TRANSPORTS)}")
        if self.seconds is None and self.examples is None and not self.exhaustive:
            object.__setattr__(self, "seconds", SECONDS)
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers}: use 1 or more")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise UsageError(f"--seconds {self.seconds:g}: use a positive number")
        if self.examples is not None and self.examples < 1:
            raise UsageError(f"--examples {self.examples}: use 1 or more")
        if self.exhaustive and self.only:
            raise UsageError("--only narrows a search; an exhaustive hunt has a scope of its own")
        self.space()
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}: use 0 or more")
        for topology in self.topologies:
            if self.exhaustive:
                one_dp_rank(topology, "the exhaustive scope")
            layers = "dm" * max(1, topology.pp)
            check(Options(topology=topology, layers=layers).tiny, topology)

    def space(self) -> Space:
        """What to draw from."""
        return Space.of(self.topologies).only(self.only)


Progress = Callable[[str], None]


def run_hunt(options: HuntOptions, progress: Progress) -> HuntReport:
    """Search until an example fails or the budget is spent; write a failure's replay file.

    Raises:
        UsageError, UnknownFault: the input makes no sense.
        WorkerDied: a worker process ended.
    """
    fault = find(options.fault) if options.fault else None
    torch.set_num_threads(1)
    progress("importing vLLM")
    if options.transport == "gloo":
        return _Hunt(options, progress).run()  # vLLM and the fault are in the ranks' processes
    prepare()
    if not options.exhaustive:
        warm_up(options.space())
    # vLLM's hundred thousand objects live for ever: no collection has to look at them again.
    gc.collect()
    gc.freeze()
    with fault.apply() if fault else nullcontext():
        return _Hunt(options, progress).run()


class _Hunt:
    """One hunt: what the workers have told so far."""

    def __init__(self, options: HuntOptions, progress: Progress) -> None:
        self._options, self._progress = options, progress
        self._tally = Tally()
        self._failures: list[Failure] = []
        self._found = False
        self._started = time.monotonic()

    def run(self) -> HuntReport:
        """Search, or go through every case."""
        return self.exhaust() if self._options.exhaustive else self.search()

    @contextmanager
    def _examiner(self) -> Iterator[Examiner]:
        """A worker's examiner, with its ranks."""
        with ExitStack() as stack:
            processes = None
            if self._options.transport == "gloo":
                processes = stack.enter_context(rank_processes(self._options.fault))
            yield stack.enter_context(Examiner(processes=processes))

    def search(self) -> HuntReport:
        """Draw examples at random."""
        options = self._options
        space = options.space()
        share = None
        if options.examples is not None:
            # Rounded up: the workers together draw no fewer than asked for.
            share = -(-options.examples // options.workers)

        def job(link: Link, number: int) -> None:
            told = _Told(link)
            budget = Budget(seconds=options.seconds, examples=share, stopped=link.stopped)
            with self._examiner() as examiner:
                seed = options.seed * 4099 + number
                failure = search(
                    space,
                    seed,
                    budget,
                    examiner,
                    told.tally,
                    told.tick,
                    first=space.rich()[number :: options.workers],
                    found=lambda: link.send(FOUND),
                )
            told.flush()
            if failure is not None:
                link.send(failure)

        run_workers(options.workers, job, self._hear, self._over, self._show)
        never = self._tally.never(space.expected())
        return self._report(never=never)

    def exhaust(self) -> HuntReport:
        """Examine every case that is not done yet."""
        options = self._options
        scope = Scope.of(options.topologies)
        path = options.state or options.directory / f"exhaustive-{scope.fingerprint}.json"
        done = Done.read(path, scope, importlib.metadata.version("vllm"))
        left = [i for i in range(len(scope.blocks)) if i not in {*done.blocks}]
        budget = Budget(seconds=options.seconds, examples=options.examples)

        def job(link: Link, number: int) -> None:
            told = _Told(link)

            def stopped() -> bool:
                told.tick()
                return link.stopped() or budget.spent(told.count * options.workers)

            with self._examiner() as examiner:
                for block in left[number :: options.workers]:
                    end = run_block(scope.blocks[block], examiner, told.tally, stopped)
                    told.flush()
                    if end is None:
                        link.send(block)
                    else:
                        if end is not False:
                            link.send(end)
                        return

        def hear(message: object) -> None:
            if isinstance(message, int):
                done.blocks.append(message)
                done.write(path)
            else:
                self._hear(message)

        # A fault's progress is not the code's.
        if options.fault is not None:
            raise UsageError("--exhaustive with --fault: use one of them")
        run_workers(options.workers, job, hear, self._over, self._show)
        return self._report(cases=scope.cases, done=done.cases(scope))

    def _hear(self, message: object) -> None:
        if isinstance(message, Tally):
            self._tally.merge(message)
            if self._options.workers == 1:
                self._show()
        elif isinstance(message, Failure):
            self._failures.append(message)
        elif message == FOUND:
            self._found = True

    def _over(self) -> bool:
        """Whether the others may stop: one failure is enough."""
        return self._found or bool(self._failures)

    def _show(self) -> None:
        seconds = time.monotonic() - self._started
        count = self._tally.examples
        self._progress(
            f"{count:,} examples, {count / max(seconds, 1e-9):.0f} a second, "
            f"{len(self._tally.classes)} classes, {seconds:.0f} s"
        )

    def _report(self, **more: object) -> HuntReport:
        seconds = time.monotonic() - self._started
        failure = min(self._failures, key=lambda f: extent(f.example), default=None)
        replay = None
        if failure is not None:
            replay = Replay(
                vllm=importlib.metadata.version("vllm"),
                fault=self._options.fault,
                example=failure.example,
                verdict=Expected.of(failure.verdict),
            ).write(self._options.directory)
        return HuntReport(
            tally=self._tally,
            seconds=seconds,
            workers=self._options.workers,
            seed=self._options.seed,
            failure=failure,
            replay=replay,
            **more,  # type: ignore[arg-type]
        )


class _Told:
    """What a worker has drawn since it last told."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.tally = _Running()
        self._last = time.monotonic()

    @property
    def count(self) -> int:
        """Examples in all."""
        return self.tally.examples

    def tick(self) -> None:
        """Tell, if it is time."""
        if time.monotonic() - self._last >= TELL:
            self.flush()

    def flush(self) -> None:
        """Tell now."""
        self._link.send(self.tally.news())
        self._last = time.monotonic()


class _Running(Tally):
    """A tally that can say what was added since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self._news = Tally()

    def add(self, example: Example, known: Set[str] = frozenset()) -> None:
        super().add(example, known)
        self._news.add(example, known)

    def news(self) -> Tally:
        """What is new."""
        news, self._news = self._news, Tally()
        return news

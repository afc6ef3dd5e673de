"""Worlds for tests: folded, watched by the sanitizer, and closed when the test ends.

Rule: every world is new. Making one takes milliseconds, and nothing that a test leaves behind in
groups, globals or random generators can reach another test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

from properties.sanitizer import RULES, Allow, Finding, Sanitizer
from rankfold.declared import declarations
from sim import Ledger, Misuse, Observer, RankContext, RankFailed, SimError, Topology, World
from sim.calls import Call
from sim.fabric import Group
from sim.mailbox import Post

P = ParamSpec("P")
R = TypeVar("R")
_HERE = str(Path(__file__).parent)
_AT_ONCE = frozenset(
    ("dropped result", "not replicated", *(r.name for r in RULES if r.says and not r.by_habit))
)
"""Rules whose findings stand, whatever the program does later. The others are asked when a world
ends, since more of the program can show that it is right."""


class WatchedWorld:
    """A world of a test. Get it from the fixtures `world` and `vllm_world`.

    Invariant: what the sanitizer finds in a run fails that run, unless it is allowed.
    """

    def __init__(
        self,
        topology: Topology | str | int,
        *,
        allow: Iterable[Allow] = (),
        sanitizer: bool = True,
        observers: Sequence[Observer] = (),
        around: Callable[[RankContext], Any] | None = None,
        plumbing: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """Start the ranks.

        Args:
            topology: a topology, its word, or a number of ranks.
            allow: sites known to be good, each with its reason.
            sanitizer: False lets no rule judge the traffic of this world.
            observers: what else is shown every operation.
            around: makes the context in which a rank runs each program.
            plumbing, options: of `sim.World`, such as `seed` or `rendezvous_sends`.
        """
        layout = as_topology(topology)
        self._sanitizer = Sanitizer(allow, topology=layout) if sanitizer else None
        self._sites = _Sites()
        self._around = around
        self._said: set[tuple[str, str, str]] = set()
        watch: list[Observer] = [*observers]
        if self._sanitizer:
            watch += [self._sanitizer, self._sites]
        self._world = World(layout, observers=watch, plumbing=(_HERE, *plumbing), **options)
        self._closed = False

    @property
    def topology(self) -> Topology:
        """The ranks' layout."""
        return self._world.topology

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def ledger(self) -> Ledger:
        """Every operation that the ranks completed, in order."""
        return self._world.ledger

    @property
    def findings(self) -> list[Finding]:
        """What the sanitizer has found so far, also what is allowed."""
        return self._sanitizer.findings if self._sanitizer else []

    def run(
        self, program: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `program(context, ...)` on every rank and return the results by rank.

        A rank whose program skips the test, or rejects a Hypothesis example, does so for the
        whole test.

        Raises:
            AssertionError: the sanitizer found something that is not allowed.
            SimError: the run broke, such as `Deadlock`, or `RankFailed` with the rank's own
                exception as its cause; see `sim.World.run`.
        """
        __tracebackhide__ = True
        if self._closed:
            raise Misuse("this world ended with the test (or example) that made it; make a new one")

        def within(context: RankContext) -> R:
            __tracebackhide__ = True
            if self._around is None:
                return program(context, *args, **kwargs)
            with self._around(context):
                return program(context, *args, **kwargs)

        try:
            with self._listening():
                results = self._world.run(within)
        except SimError as error:
            # Without the runtime's own frames, the traceback ends at the line of the test.
            cause = error.__cause__
            if isinstance(error, RankFailed) and cause is not None and _is_control(cause):
                raise cause from None
            raise error.with_traceback(None) from cause
        fresh = [f for f in self.findings if f.rule in _AT_ONCE and not self._known(f)]
        if fresh:
            raise AssertionError(found(fresh))
        return results

    def forget(self) -> None:
        """Start afresh: an empty ledger, and no findings so far."""
        self.ledger.clear()
        self._sites.seen.clear()
        if self._sanitizer:
            self._sanitizer.clear()

    def close(self) -> None:
        """End the ranks. Closing again is harmless."""
        self._closed = True
        self._world.close()

    def _listening(self) -> AbstractContextManager[None]:
        """Meanwhile the sanitizer is told what the program declares with `rankfold.replicated`."""
        return declarations(self._sanitizer, self.topology) if self._sanitizer else nullcontext()

    def _known(self, finding: Finding) -> bool:
        """Whether a finding needs no word: it is allowed, or has failed a run already."""
        key = (finding.rule, finding.site, finding.what)
        known = finding.allowed is not None or key in self._said
        self._said.add(key)
        return known


class Worlds:
    """The worlds of the test that runs now; calling it makes one more."""

    def __init__(
        self,
        make: Callable[..., WatchedWorld] = WatchedWorld,
        marked: Callable[[], Sequence[Allow]] = tuple,
    ) -> None:
        """make: makes a world. marked: what the running test allows in all of its worlds."""
        self._make = make
        self._marked = marked
        self._open: list[WatchedWorld] = []
        self._late: dict[tuple[str, str], Finding] = {}
        self._differed: set[str] = set()
        self.allowed: list[Finding] = []
        """What was found and is allowed, in all worlds of the test."""

    def __call__(
        self, topology: Topology | str | int, *, allow: Iterable[Allow] = (), **options: Any
    ) -> WatchedWorld:
        """A new world; see `WatchedWorld`. It ends with the test, or the Hypothesis example."""
        __tracebackhide__ = True
        try:
            made = self._make(topology, allow=[*self._marked(), *allow], **options)
        except ValueError as error:
            # A topology or a rule that means nothing: the line of the test says enough.
            raise error.with_traceback(None) from None
        self._open.append(made)
        if "hypothesis" in sys.modules:
            from hypothesis.control import cleanup, currently_in_test_context

            if currently_in_test_context():
                cleanup(lambda: self._end(made))
        return made

    def __repr__(self) -> str:
        return f"<{len(self._open)} open worlds>"

    def verdict(self) -> str:
        """What is wrong with the test's traffic as a whole; "" if nothing is."""
        self.close()
        late = [f for (_, site), f in self._late.items() if site not in self._differed]
        return found(late) if late else ""

    def close(self) -> None:
        """End the worlds that are still open."""
        for each in [*self._open]:
            self._end(each)

    def reset(self) -> None:
        """Get ready for another test."""
        self.close()
        self._late.clear()
        self._differed.clear()
        self.allowed.clear()

    def _end(self, world: WatchedWorld) -> None:
        if world not in self._open:
            return
        self._open.remove(world)
        findings = world.findings
        world.close()
        late = {
            (f.rule, f.site): f for f in findings if f.rule not in _AT_ONCE and f.allowed is None
        }
        self._late.update(late)
        # A site counts as wrong only if no world of the test shows that it can be right.
        self._differed |= world._sites.seen - {site for _, site in late}
        self.allowed += [f for f in findings if f.allowed is not None]


def found(findings: Sequence[Finding]) -> str:
    """The findings as the text of a failed test; the first one is its first line."""
    lines = []
    for finding in findings:
        lines += [
            f"{finding.rule}: {finding.what}",
            f"  where: {finding.where}",
            f"  why:   {finding.why}",
        ]
    lines.append('if that is right, mark the test: rankfold_allow(RULE, "FILE:LINE", REASON)')
    return "\n".join(lines)


class _Sites:
    """An observer that remembers where operations were called."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def collective(self, group: Group, calls: Sequence[Call]) -> None:
        self.seen.add(str(calls[0].site))

    def message(self, group: Group, send: Post, recv: Post) -> None:
        self.seen.add(str(send.site))


def as_topology(topology: Topology | str | int) -> Topology:
    """The topology of a word, or of a number of ranks."""
    if isinstance(topology, int):
        return Topology(tp=topology)
    return Topology.parse(topology) if isinstance(topology, str) else topology


def _is_control(error: BaseException) -> bool:
    """Whether an exception ends a test or an example on purpose: a skip, or an assumption."""
    if isinstance(error, pytest.skip.Exception | pytest.xfail.Exception | pytest.exit.Exception):
        return True
    kind = type(error)
    return kind.__module__ == "hypothesis.errors" and kind.__name__ in (
        "UnsatisfiedAssumption",
        "StopTest",
    )

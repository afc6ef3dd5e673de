"""All checks of one run of a stand-in program, as verdicts in the order in which to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model.taps import Captured, Recorder
from properties.faults.program import Program, Seat, Truth
from properties.headline import broken, headline, oracle
from properties.headline import sanitizer as sanitizer_says
from properties.oracle import TapVerdict, compare_taps
from properties.replication import same_across_ranks
from properties.sanitizer import Sanitizer
from properties.verdict import Verdict
from sim import Ledger, RankContext, Schedule, SimError, Topology, World


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the checks say of one run."""

    checks: list[Verdict]
    taps: list[TapVerdict]
    """Every tap against the truth, in program order."""
    captured: Sequence[Mapping[str, Captured]]
    """The taps of each rank, by rank."""
    ledger: Ledger
    """The run's traffic."""

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def headline(self) -> Verdict | None:
        """The failed check that is about the earliest place; None if all hold."""
        return headline(self.checks, self.taps)

    @property
    def bytes(self) -> int:
        """Bytes that crossed between ranks in all."""
        return sum(entry.bytes for entry in self.ledger.entries)


def judge_program(
    program: Program,
    topology: Topology,
    tokens: tuple[int, ...],
    schedule: Schedule | None = None,
) -> Judged:
    """Run a program on a world of its own and apply every check.

    Args:
        program: what runs.
        topology: the ranks' layout, of one stage.
        tokens: how many tokens each DP rank has.
        schedule: the order of ranks and messages; the plain one by default.

    Raises:
        ValueError: the topology has several stages, or another number of DP ranks.
    """
    if topology.pp > 1 or len(tokens) != topology.dp:
        raise ValueError(
            f"{program.name} runs on one stage, with tokens for each DP rank: {topology} has "
            f"{topology.pp} stages and {topology.dp} DP ranks, tokens are {tokens}"
        )
    sanitizer = Sanitizer(topology=topology)
    recorders = [Recorder() for _ in range(topology.world_size)]
    broke: SimError | None = None
    with World(topology, observers=[sanitizer]) as world:
        seats = world.run(lambda ctx: _seat(ctx, tokens, recorders))
        world.ledger.clear()
        sanitizer.clear()
        try:
            world.run(lambda ctx: program.step(seats[ctx.rank]), schedule=schedule or Schedule())
        except SimError as error:
            broke = error
        ledger = world.ledger
        findings = sanitizer.findings
    captured = [recorder.latest for recorder in recorders]
    truth = program.truth(topology, tokens)
    if broke is not None:
        truth = _recorded_whole(topology, captured, truth)
    taps = compare_taps(topology, captured, truth.taps, truth.bounds, truth.parts)
    checks = [oracle(taps)]
    if broke is not None:
        checks.append(broken(broke))
    else:
        checks.append(same_across_ranks(topology, [_of_groups(taps) for taps in captured]))
    checks.append(sanitizer_says(findings))
    return Judged(checks=checks, taps=taps, captured=captured, ledger=ledger)


def _seat(ctx: RankContext, tokens: tuple[int, ...], recorders: Sequence[Recorder]) -> Seat:
    recorders[ctx.rank].start()
    return Seat(ctx, tokens, recorders[ctx.rank])


def _of_groups(taps: Mapping[str, Captured]) -> dict[str, Captured]:
    """The taps that more than one rank has: all but those named after an EP rank."""
    return {name: tap for name, tap in taps.items() if not _owner(name, "ep")}


def _owner(name: str, axis: str) -> str:
    """The index along an axis that a tap is named after, as in "dp1.ffn", or ""."""
    first, _, rest = name.partition(".")
    index = first.removeprefix(axis)
    return index if rest and index != first and index.isdigit() else ""


def _recorded_whole(
    topology: Topology, captured: Sequence[Mapping[str, Captured]], truth: Truth
) -> Truth:
    """The truth of what every rank had recorded that records it at all when the run broke."""

    def whole(name: str) -> bool:
        have = {rank for rank, taps in enumerate(captured) if name in taps}
        due = set(range(topology.world_size))
        if own := _owner(name, "dp"):
            due = {rank for rank in due if topology.coordinates(rank)["dp"] == int(own)}
        elif own := _owner(name, "ep"):
            due = {int(own)}
        return have == due

    taps = {name: value for name, value in truth.taps.items() if whole(name)}
    return Truth(taps=taps, bounds=truth.bounds, parts=truth.parts)

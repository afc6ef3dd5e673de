"""The oracle: each tap of a run against the float64 reference, before and after norms.

A norm hides an error of scale, so the taps of interest lie before norms. The first tap in
program order that is wrong is the diagnosis; what follows from it is not news.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from properties.captured import Captured
from properties.deviations import largest_deviations
from properties.explain import Diagnosis, diagnose
from properties.placement import Placement, PlacementError
from properties.recogniser_rows import deviation
from properties.selection import diagnose_blocks
from sim import Topology


@dataclass(frozen=True, kw_only=True)
class TapVerdict:
    """One tap against the reference."""

    name: str
    ok: bool
    expected: str
    """The placement expected, such as "Replicate" or "Partial(tp)"."""
    max_abs_err: float
    """Largest deviation of any rank (inf where shapes differ or values are not finite)."""
    bound: float
    """Largest deviation that rounding can explain."""
    where: str = ""
    """Ranks and rows, when it is wrong."""
    why: str = ""
    """What the wrong value looks like, when it is wrong."""
    kind: str = ""
    """The class of fault, one of `explain.KINDS`, "ranks differ" or "not computed"."""
    rows: tuple[int, ...] = ()
    """The rows that are wrong, where they can be told."""


def compare_taps(
    topology: Topology,
    captured: Sequence[Mapping[str, Captured]],
    truth: Mapping[str, torch.Tensor],
    bounds: Mapping[str, float],
    parts: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    sources: Mapping[str, Mapping[str, str]] | None = None,
) -> list[TapVerdict]:
    """Compare every tap that the reference knows, in program order.

    Args:
        topology: the ranks' layout.
        captured: the taps of each rank, by rank, each in program order.
        truth: the reference's taps, float64 [T, ...], in program order.
        bounds: for each tap the largest error that rounding can explain.
        parts: what a tap's full value is a sum of, by tap and name, [T, ...], as far as known.
        sources: the taps of these parts, by tap and name; where a part's tap is still to be summed
            over the ranks, they tell a rank's own addend.
    """
    verdicts = []
    earlier: dict[str, torch.Tensor] = {}
    choices: dict[str, torch.Tensor] = {}
    deviations = largest_deviations(topology, captured, truth)

    def judged(name: str, expected: torch.Tensor) -> TapVerdict:
        if name in deviations:
            placement, off = deviations[name]
            if off <= bounds[name]:
                return TapVerdict(
                    name=name, ok=True, expected=str(placement), max_abs_err=off, bound=bounds[name]
                )
        local = {rank: taps[name] for rank, taps in enumerate(captured) if name in taps}
        question = _Question(
            name=name,
            topology=topology,
            truth=expected,
            bound=bounds[name],
            parts=(parts or {}).get(name, {}),
            earlier=dict(earlier),
            choices=dict(choices),
            others=_siblings(name, truth),
            addends=_addends((sources or {}).get(name, {}), captured),
        )
        return _compare(question, local)

    for name, expected in truth.items():
        verdicts.append(judged(name, expected))
        if expected.is_floating_point():
            earlier[name] = expected
        if name.endswith(".blocks_chosen"):
            choices[name] = expected
    return verdicts


@dataclass(frozen=True, kw_only=True)
class _Question:
    """One tap's truth, and what helps to say what a wrong value is."""

    name: str
    topology: Topology
    truth: torch.Tensor
    bound: float
    parts: Mapping[str, torch.Tensor]
    earlier: Mapping[str, torch.Tensor]
    """The full values of the taps before, in program order."""
    choices: Mapping[str, torch.Tensor]
    """The blocks chosen by the layers before, in program order."""
    others: Mapping[str, torch.Tensor]
    """The same value of other DP ranks, where each has its own."""
    addends: Mapping[str, Mapping[int, torch.Tensor]]
    """Each rank's addend of a part, by the part's name."""

    def wrong(
        self,
        expected: str,
        where: str,
        why: Diagnosis,
        off: float,
        rows: tuple[int, ...] = (),
    ) -> TapVerdict:
        """The verdict on a wrong value."""
        return TapVerdict(
            name=self.name,
            ok=False,
            expected=expected,
            max_abs_err=off,
            bound=self.bound,
            where=where,
            why=why.text,
            kind=why.kind,
            rows=rows,
        )

    def diagnose(
        self,
        values: Mapping[int, torch.Tensor],
        placement: Placement,
        worst: int = 0,
    ) -> Diagnosis:
        """What the wrong values of one group look like."""
        # The latest first: a value that was not written since is most likely the last one.
        alike = {n: t for n, t in reversed([*self.earlier.items()]) if t.shape == self.truth.shape}
        own = {
            part: [of_rank[rank] for rank in values]
            for part, of_rank in self.addends.items()
            if all(rank in of_rank for rank in values)
        }
        return diagnose(
            [*values.values()],
            self.truth,
            self.bound,
            placement,
            worst=worst,
            parts=self.parts,
            earlier=alike,
            others=self.others,
            addends=own,
            handed_on=self.name.startswith(("stage.", "aux.")),
        )


def _addends(
    sources: Mapping[str, str], captured: Sequence[Mapping[str, Captured]]
) -> dict[str, dict[int, torch.Tensor]]:
    """Each rank's addend of the parts whose taps are still to be summed, by part and rank."""
    return {
        part: {
            rank: taps[tap].value
            for rank, taps in enumerate(captured)
            if tap in taps and taps[tap].declared.startswith("partial")
        }
        for part, tap in sources.items()
    }


def _siblings(name: str, truth: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The taps of other DP ranks that have this one's name, as "dp1.ffn" has "dp0.ffn"."""
    own = re.fullmatch(r"dp(\d+)\.(.+)", name)
    if own is None:
        return {}
    found = {}
    for other, value in truth.items():
        theirs = re.fullmatch(r"dp(\d+)\.(.+)", other)
        if theirs and theirs[2] == own[2] and theirs[1] != own[1]:
            found[f"dp {theirs[1]}"] = value
    return found


def _compare(asked: _Question, local: Mapping[int, Captured]) -> TapVerdict:
    infinite, tokens = float("inf"), asked.truth.shape[0]
    if not local:
        text = "no rank has it: the module it is taken from did not run"
        return asked.wrong(
            "on some rank", "all ranks", Diagnosis(kind="not computed", text=text), infinite
        )
    values = {rank: tap.value for rank, tap in local.items()}
    declared = sorted({tap.declared for tap in local.values()})
    if len(declared) > 1:
        expected = " or ".join(str(Placement.parse(text)) for text in declared)
        why = Diagnosis(kind="ranks differ", text="the ranks declare different placements")
        return asked.wrong(expected, f"ranks {sorted(local)}", why, infinite)
    placement = Placement.parse(declared[0])
    try:
        full = placement.full_values(asked.topology, values, tokens)
    except PlacementError as error:
        parts = _badly_placed(placement, asked.topology, values, tokens)
        missing = Diagnosis(kind="ranks differ", text=str(error))
        if placement.kind == "heads" and parts:
            parts, missing = {}, Diagnosis(kind="wrong shape", text=str(error))
        why = asked.diagnose(parts, placement) if parts else missing
        return asked.wrong(str(placement), f"ranks {sorted(values)}", why, infinite)
    worst_ranks, worst = max(
        ((ranks, _deviation(value, asked.truth)) for ranks, value in full.items()),
        key=lambda pair: pair[1],
    )
    if placement.kind == "heads":
        why = diagnose_blocks(full[worst_ranks], asked.truth.double(), asked.choices)
    else:
        group = [r for r in asked.topology.group_of(worst_ranks[0], placement.axis) if r in values]
        why = asked.diagnose(
            {rank: values[rank] for rank in group}, placement, group.index(worst_ranks[0])
        )
    rows = _wrong_rows(full[worst_ranks], asked.truth, asked.bound)
    where = _where(placement, worst_ranks, rows, asked.truth)
    return asked.wrong(str(placement), where, why, worst, rows)


def _badly_placed(
    placement: Placement, topology: Topology, values: Mapping[int, torch.Tensor], tokens: int
) -> dict[int, torch.Tensor]:
    """The local values of the first group that cannot be combined, by rank; none if ranks lack
    theirs."""
    for group in topology.groups[placement.axis]:
        parts = {rank: values[rank] for rank in group if rank in values}
        if 0 < len(parts) < len(group):
            return {}
        try:
            placement.combine([*parts.values()], tokens)
        except PlacementError:
            return parts
    return {}


def _deviation(value: torch.Tensor, truth: torch.Tensor) -> float:
    """`deviation`, of values whose shapes may differ: inf then."""
    return deviation(value, truth.double()) if value.shape == truth.shape else float("inf")


def _wrong_rows(value: torch.Tensor, truth: torch.Tensor, bound: float) -> tuple[int, ...]:
    """The rows that are off by more than the bound; none where the shapes differ."""
    if value.shape != truth.shape:
        return ()
    wrong = ~((value - truth).abs().reshape(truth.shape[0], -1) <= bound).all(-1)
    return tuple(wrong.nonzero().flatten().tolist())


def _where(
    placement: Placement, ranks: tuple[int, ...], rows: Sequence[int], truth: torch.Tensor
) -> str:
    how = {"partial": "the sum over ", "shard": "the shards of ", "heads": "the heads of "}
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
    who = how.get(placement.kind, "") + who
    if not rows:
        return who
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"{who}, rows {shown} of {truth.shape[0]}"

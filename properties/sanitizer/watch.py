"""The observer that applies the rules at each collective, and collects what they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from properties.sanitizer import bits
from properties.sanitizer.dropped import DroppedResults
from properties.sanitizer.finding import Allow, AllowError, Finding
from properties.sanitizer.origins import Origin, Origins
from properties.sanitizer.rules import DROPPED, GATHERS, RULES, SUMS, Operation, Rule, operands
from sim.calls import Call
from sim.callsite import Frame
from sim.fabric import Group
from sim.mailbox import Post
from sim.reduction import reduce_tensors

_Place = tuple[str, tuple[int, ...], tuple[Frame, ...]]
"""Op, global ranks and frames of an operation."""


class Sanitizer:
    """Judges each collective of a world; give it to `World(observers=[...])`.

    Invariant: it changes no tensor and keeps none.

    Examples:
        >>> sanitizer = Sanitizer()
        >>> with World("tp4", observers=[sanitizer]) as world:
        ...     world.run(program)
        >>> [finding.where for finding in sanitizer.findings]
        ['all_reduce(sum) float32[4, 8] on 0[0, 1, 2, 3] at program.py:12']
    """

    def __init__(self, allow: Iterable[Allow] = (), *, rules: Sequence[Rule] = RULES) -> None:
        """Watch with these rules.

        Args:
            allow: sites known to be good; their findings are kept and marked.
            rules: what to look for, the most precise first.

        Raises:
            AllowError: an `Allow` names no rule.
        """
        self._allow = tuple(allow)
        self._rules = tuple(rules)
        names = [rule.name for rule in self._rules]
        for each in self._allow:
            if each.rule not in names:
                raise AllowError(f"allow {each.rule!r}: no such rule; use {', '.join(names)}")
        self._origins = Origins()
        self._found: dict[tuple[str, _Place, str], Finding] = {}
        self._differed: set[_Place] = set()
        self._counted: set[tuple[_Place, int]] = set()
        self._dropped = DroppedResults()

    @property
    def findings(self) -> list[Finding]:
        """What was found, in program order, also what is allowed."""
        habits = {rule.name for rule in self._rules if rule.by_habit}
        return [
            finding
            for (rule, place, _), finding in self._found.items()
            if not (rule in habits and place in self._differed)
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not allowed."""
        return all(finding.allowed is not None for finding in self.findings)

    def clear(self) -> None:
        """Forget everything, for example between two steps."""
        self._origins = Origins()
        self._found.clear()
        self._differed.clear()
        self._counted.clear()

    def collective(self, group: Group, calls: Sequence[Call]) -> None:
        """Judge a collective, and remember what it gives to all ranks."""
        first = calls[0]
        if len(calls) < 2 or not first.inputs:
            return
        is_sum = first.op in SUMS and str(first.reduction) == "sum"
        with torch.no_grad():
            for by_rank in operands(calls) if is_sum or first.op in GATHERS else []:
                self._judge(group, calls, by_rank, is_sum)
            if first.op == "all_reduce" and DROPPED in self._rules and len(first.operands()) == 1:
                for call in calls:
                    self._watch_result(group, call)
            # After the verdict, so that an operation is not its own origin.
            for output in _given_to_all(calls, is_sum):
                if bits.telling(output):
                    origin = Origin(first.op, str(first.site), is_sum)
                    self._origins.add(group.ranks, output, origin)

    def message(self, group: Group, send: Post, recv: Post) -> None:
        """A message: no rule judges one."""

    def _judge(
        self, group: Group, calls: Sequence[Call], by_rank: Sequence[bits.Parts], is_sum: bool
    ) -> None:
        parts = by_rank[0]
        whole = all(bits.equal(parts, other) for other in by_rank[1:])
        first = calls[0]
        if not whole:
            if first.op in GATHERS:
                self._differed.add((first.op, group.ranks, first.site.frames))
            return
        if not bits.telling(parts):
            return
        operation = Operation(
            op=first.op,
            is_sum=is_sum,
            size=len(calls),
            parts=parts,
            origin=self._origins.find(group.ranks, parts),
        )
        for rule in self._rules:
            said = rule.says(operation) if rule.says else None
            if said is not None:
                frames = first.site.frames
                finding = Finding(
                    rule=rule.name,
                    what=said.what,
                    why=said.why,
                    operation=str(first),
                    group=group.label,
                    ranks=group.ranks,
                    frames=frames,
                    allowed=self._reason(rule.name, frames),
                )
                self._add((first.op, group.ranks, frames), finding)
                return

    def _watch_result(self, group: Group, call: Call) -> None:
        # The closure outlives the call, and must hold none of its tensors.
        label, ranks, frames, sequence = group.label, group.ranks, call.site.frames, call.sequence
        operation = str(call)

        place = (call.op, ranks, frames)

        def dropped(variable: str) -> None:
            if (place, sequence) in self._counted:
                return
            self._counted.add((place, sequence))
            finding = Finding(
                rule=DROPPED.name,
                what=f"reduces a contiguous copy of `{variable}` and drops it",
                why=f"`{variable}` is not contiguous and stays unreduced; keep the copy, and use "
                "it in place of it",
                operation=operation,
                group=label,
                ranks=ranks,
                frames=frames,
                allowed=self._reason(DROPPED.name, frames),
            )
            self._add(place, finding)

        self._dropped.watch(call, dropped)

    def _add(self, place: _Place, finding: Finding) -> None:
        key = (finding.rule, place, finding.what)
        before = self._found.get(key)
        self._found[key] = finding if before is None else replace(before, times=before.times + 1)

    def _reason(self, rule: str, frames: tuple[Frame, ...]) -> str | None:
        return next((each.reason for each in self._allow if each.covers(rule, frames)), None)


def _given_to_all(calls: Sequence[Call], is_sum: bool) -> list[bits.Parts]:
    """What a collective will write on every rank; [] for one that gives ranks different things."""
    first = calls[0]
    if first.op == "all_reduce" and is_sum:
        reduction = first.reduction
        assert reduction is not None
        return [
            [reduce_tensors([parts[0] for parts in by_rank], reduction)]
            for by_rank in operands(calls)
            if by_rank[0][0].is_floating_point()
        ]
    if first.op in GATHERS:
        return [[parts[0] for parts in by_rank] for by_rank in operands(calls)]
    if first.op == "broadcast":
        return [[tensor] for tensor in calls[first.root or 0].inputs[0]]
    return []

"""The observer that applies the rules at each collective, and collects what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from properties.sanitizer import bits
from properties.sanitizer.book import Book, Place
from properties.sanitizer.declared import Declarations
from properties.sanitizer.dropped import DroppedResults
from properties.sanitizer.finding import Allow, Finding
from properties.sanitizer.groups import Groups
from properties.sanitizer.origins import Origin, Origins
from properties.sanitizer.replicas import WholeGathers
from properties.sanitizer.rules import (
    DROPPED,
    GATHERS,
    NOT_REPLICATED,
    RULES,
    SLICED_SHARDS,
    SUMS,
    WRONG_GROUP,
    Operation,
    Rule,
    Said,
    given_to_all,
    operands,
)
from properties.sanitizer.shards import CutShards
from properties.sanitizer.slices import SlicedSends
from sim import Topology
from sim.calls import Call
from sim.callsite import Frame
from sim.fabric import Group
from sim.mailbox import Post


class Sanitizer:
    """Judges each operation of a world; give it to `World(observers=[...])`.

    Invariant: it changes no tensor, and keeps none but what is declared replicated.

    Examples:
        >>> sanitizer = Sanitizer()
        >>> with World("tp4", observers=[sanitizer]) as world:
        ...     world.run(program)
        >>> [finding.where for finding in sanitizer.findings]
        ['all_reduce(sum) float32[4, 8] on 0[0, 1, 2, 3] at program.py:12']
    """

    def __init__(
        self,
        allow: Iterable[Allow] = (),
        *,
        rules: Sequence[Rule] = RULES,
        topology: Topology | None = None,
    ) -> None:
        """Watch with these rules.

        Args:
            allow: sites known to be good; their findings are kept and marked.
            rules: what to look for, the most precise first.
            topology: the world's, for the names of its groups.

        Raises:
            AllowError: an `Allow` names no rule.
        """
        self._rules = tuple(rules)
        self._topology = topology
        self._book = Book(allow, self._rules)
        self._dropped = DroppedResults()
        self.clear()

    def clear(self) -> None:
        """Forget everything, for example between two steps."""
        self._book.clear()
        self._origins = Origins()
        self._differed: set[Place] = set()
        self._counted: set[tuple[Place, int]] = set()
        self._groups = Groups(self._topology)
        self._whole = WholeGathers()
        self._shards = CutShards(self._groups)
        self._slices = SlicedSends()
        self._gathers: dict[Place, tuple[str, str]] = {}
        self._declared = Declarations(self._groups)
        self._looked: Counter[str] = Counter()

    @property
    def findings(self) -> list[Finding]:
        """What was found, in program order, also what is allowed."""
        found = [each for _, each in self._by_operation() if self._excuse(each) is None]
        if WRONG_GROUP in self._rules:
            found += self._cut_over_another_group()
        if NOT_REPLICATED in self._rules:
            for (name, ranks, frames), said, what in self._declared.said():
                place = ("replicated", ranks, frames)
                group = self._groups.name(ranks).partition("[")[0].strip()
                operation = f"`{name}` {what}"
                found.append(self._book.finding(NOT_REPLICATED.name, place, said, operation, group))
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not allowed."""
        return all(finding.allowed is not None for finding in self.findings)

    @property
    def looked_at(self) -> dict[str, int]:
        """How many operations and values were judged, by kind."""
        kinds = {kind: self._looked[kind] for kind in ("sums", "gathers", "messages")}
        return {**kinds, "declared values": self._declared.judged}

    @property
    def not_judged(self) -> list[str]:
        """What was taken to be right on the caller's word, and what was declared and could not be
        compared, each in a line."""
        taken = []
        for _, finding in self._by_operation():
            excuse = self._excuse(finding)
            if excuse is not None:
                taken.append(f"{finding.rule} at {finding.site}: taken for {excuse}")
        return taken + self._declared.not_judged

    def replicated(
        self,
        rank: int,
        ranks: tuple[int, ...],
        value: Sequence[torch.Tensor],
        *,
        name: str,
        frames: tuple[Frame, ...],
    ) -> None:
        """A rank declares that a value is the same on all ranks of a group.

        Args:
            rank: the global rank that holds the value.
            ranks: the group's global ranks.
            value: its tensors.
            name: how to call it.
            frames: where it is declared, the innermost frame first.
        """
        self._groups.add_made()
        self._declared.add(rank, ranks, value, name=name, frames=frames, origins=self._origins)

    def collective(self, group: Group, calls: Sequence[Call]) -> None:
        """Judge a collective, and remember what it gives to all ranks."""
        first = calls[0]
        if len(calls) < 2 or not (first.inputs or first.op == "scatter"):
            return
        is_sum = first.op in SUMS and str(first.reduction) == "sum"
        self._groups.add(group.ranks, group.label)
        with torch.no_grad():
            self._shards.collective(group.ranks, calls)
            for by_rank in operands(calls) if is_sum or first.op in GATHERS else []:
                self._looked["sums" if is_sum else "gathers"] += 1
                self._judge(group, calls, by_rank, is_sum)
            if first.op == "all_reduce" and DROPPED in self._rules and len(first.operands()) == 1:
                for call in calls:
                    self._watch_result(group, call)
            # After the verdict, so that an operation is not its own origin.
            for output in given_to_all(calls, is_sum):
                if bits.telling(output):
                    origin = Origin(first.op, first.site, is_sum)
                    self._origins.add(group.ranks, output, origin)
            self._slices.collective(calls)

    def message(self, group: Group, send: Post, recv: Post) -> None:
        """Remember a message: it is judged when what it brought is gathered."""
        self._looked["messages"] += 1
        with torch.no_grad():
            self._shards.message(send.rank, recv.rank)
            if SLICED_SHARDS in self._rules:
                self._slices.message(send, recv)

    def _judge(
        self, group: Group, calls: Sequence[Call], by_rank: Sequence[bits.Parts], is_sum: bool
    ) -> None:
        parts, first = by_rank[0], calls[0]
        place = (first.op, group.ranks, first.site.frames)
        whole = all(bits.equal(parts, other) for other in by_rank[1:])
        if first.op in GATHERS:
            self._note_gather(group, calls, by_rank, whole)
        if not whole or not bits.telling(parts):
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
                finding = self._book.finding(rule.name, place, said, str(first), group.label)
                self._book.enter(place, finding)
                return

    def _note_gather(
        self, group: Group, calls: Sequence[Call], by_rank: Sequence[bits.Parts], whole: bool
    ) -> None:
        first = calls[0]
        place = (first.op, group.ranks, first.site.frames)
        if place not in self._gathers:
            self._gathers[place] = (str(first), group.label)
            self._groups.add_made()
        if whole:
            self._whole.add((place[0], place[2]), group.ranks, bits.digest(by_rank[0]))
            return
        self._differed.add(place)
        self._shards.gather(group.ranks, calls, by_rank)
        sent_at = self._slices.gathers_shards(calls, by_rank)
        if sent_at is not None:
            said = Said(
                what=f"puts together slices of {len(calls)} different tensors, sent at {sent_at}",
                why="each rank sent one slice of its own shard, which is right only for a tensor "
                "that is the same on all of them; gather the shards before, or send them whole",
            )
            finding = self._book.finding(SLICED_SHARDS.name, place, said, str(first), group.label)
            self._book.enter(place, finding)

    def _by_operation(self) -> list[tuple[Place, Finding]]:
        """What the operations show, one by one, whatever the caller's source says."""
        habits = {rule.name for rule in self._rules if rule.by_habit}
        return [
            (place, self._by_group(place, finding))
            for place, finding in self._book.entries()
            if not (finding.rule in habits and place in self._differed)
        ]

    def _excuse(self, finding: Finding) -> str | None:
        """What the caller's source says an operation is, if that makes it right."""
        rule = next(rule for rule in self._rules if rule.name == finding.rule)
        if rule.excuse is None or not finding.frames:
            return None
        meant = rule.excuse(finding.frames[0], len(finding.ranks))
        return rule.excused_as if meant else None

    def _by_group(self, place: Place, finding: Finding) -> Finding:
        """The finding, or the wrong group where that is what it shows."""
        op, ranks, frames = place
        if op not in GATHERS or WRONG_GROUP not in self._rules:
            return finding
        over = self._whole.meant((op, frames), ranks, self._groups)
        if over is None:
            return finding
        name = self._groups.name
        said = Said(
            what=f"gathers over {name(ranks)} what is the same there and differs over {name(over)}",
            why=f"the shards are on {name(over)}: gather over that group",
        )
        moved = self._book.finding(WRONG_GROUP.name, place, said, finding.operation, finding.group)
        return replace(moved, times=finding.times)

    def _cut_over_another_group(self) -> list[Finding]:
        found = []
        name = self._groups.name
        for (op, frames), ranks, over, origin in self._shards.wrong():
            place = (op, ranks, frames)
            said = Said(
                what=f"gathers over {name(ranks)} shards over {name(over)}, {origin}",
                why=f"no operation puts together the shards over {name(over)} alone: gather over "
                "that group",
            )
            found.append(self._book.finding(WRONG_GROUP.name, place, said, *self._gathers[place]))
        return found

    def _watch_result(self, group: Group, call: Call) -> None:
        if not self._dropped.may_drop(call):
            return
        # The closure outlives the call, and must hold none of its tensors.
        label, ranks, frames, sequence = group.label, group.ranks, call.site.frames, call.sequence
        operation = str(call)
        place = (call.op, ranks, frames)

        def dropped(variable: str) -> None:
            if (place, sequence) in self._counted:
                return
            self._counted.add((place, sequence))
            said = Said(
                what=f"reduces a contiguous copy of `{variable}` and drops it",
                why=f"`{variable}` is not contiguous and stays unreduced; keep the copy, and use "
                "it in place of it",
            )
            finding = self._book.finding(DROPPED.name, place, said, operation, label)
            self._book.enter(place, finding)

        self._dropped.watch(call, dropped)

"""Variables of a script that its user declares replicated: `--replicated NAME[@WHERE]`.

A variable is the script's own, at module level; or, if there is none of that name, a local one of
the outermost functions of the script that have it, as it is when they return.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from properties.sanitizer import Sanitizer
from rankfold.declared import tensors_in
from rankfold.errors import UsageError
from sim import Topology
from sim.callsite import Frame
from sim.topology import AXES

_FORM = re.compile(r"((?:\w+\.)*)([^\W\d]\w*)(?:@(.+))?")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A variable declared replicated."""

    text: str
    """As the user wrote it."""
    name: str
    function: str = ""
    """The function whose local variable it is; "" if the user did not say."""
    axis: str = ""
    """Replicated over the groups of this axis; "" if ranks are given, or none."""
    ranks: tuple[int, ...] = ()
    """Replicated over these ranks; () is all of them."""

    @classmethod
    def parse(cls, text: str, topology: Topology) -> Declared:
        """From `out`, `step.out`, `out@tp` or `out@0,1`.

        Raises:
            UsageError: it is none of these, or its ranks are not in the topology.
        """
        form = _FORM.fullmatch(text.strip())
        if form is None:
            raise UsageError(f"--replicated {text!r}: use NAME, FUNCTION.NAME, NAME@tp or NAME@0,1")
        function, name, where = form[1].rstrip("."), form[2], form[3] or ""
        if where in AXES:
            if len(topology.group_of(0, where)) < 2:
                raise UsageError(f"--replicated {text}: {topology} has one rank along {where}")
            return cls(text=text, name=name, function=function, axis=where)
        numbers = [part.strip() for part in where.split(",")] if where else []
        if not all(number.isdecimal() for number in numbers):
            raise UsageError(
                f"--replicated {text!r}: {where!r} is no axis (tp, pp, dp, ep) or ranks"
            )
        ranks = tuple(sorted({int(number) for number in numbers}))
        if len(ranks) == 1 or any(rank >= topology.world_size for rank in ranks):
            last = topology.world_size - 1
            raise UsageError(f"--replicated {text}: give two ranks or more, of 0 to {last}")
        return cls(text=text, name=name, function=function, ranks=ranks)

    def over(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """The ranks that a rank's value is compared with; () if it is not."""
        if self.axis:
            return topology.group_of(rank, self.axis)
        ranks = self.ranks or tuple(range(topology.world_size))
        return ranks if rank in ranks else ()


@dataclass(slots=True)
class _Seen:
    """What one rank's functions left in a variable: at the outermost depth where there was one."""

    depth: int = sys.maxsize
    values: list[tuple[Frame, list[torch.Tensor]]] = field(default_factory=list)


class Variables:
    """Reads the declared variables of a script, rank by rank."""

    def __init__(self, script: str, declared: tuple[Declared, ...], topology: Topology) -> None:
        self._script = script
        self._declared = declared
        self._topology = topology
        self._seen: dict[tuple[int, Declared], _Seen] = {}
        self._have: dict[Declared, set[int]] = {each: set() for each in declared}
        self._problem = ""

    def watch(self, rank: int) -> None:
        """Watch the functions of the script return, on this thread, until `end`."""
        if not self._declared:
            return

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "return" and frame.f_code.co_filename == self._script:
                self._returns(rank, frame)

        sys.setprofile(profile)

    def end(
        self, rank: int, code: CodeType, module: Mapping[str, Any], sanitizer: Sanitizer | None
    ) -> None:
        """A rank's script has ended: declare its variables.

        Args:
            rank: the global rank.
            code: the script's.
            module: the script's variables.
            sanitizer: whom to tell; None if the rank broke.
        """
        if not self._declared:
            return
        sys.setprofile(None)
        if sanitizer is None:
            return
        for each in self._declared:
            over = each.over(rank, self._topology)
            for frame, value in self._values(rank, each, code, module):
                self._have[each].add(rank)
                sanitizer.replicated(rank, over, value, name=each.name, frames=(frame,))

    def check(self) -> None:
        """Check that each variable was there, on all ranks that should have it.

        Raises:
            UsageError: it was not, it is no tensor, or it is not clear which one is meant.
        """
        if self._problem:
            raise UsageError(self._problem)
        for each in self._declared:
            have = self._have[each]
            if not have:
                raise UsageError(
                    f"--replicated {each.text}: no variable {each.name!r} of the script, or of a "
                    "function of it that returned"
                )
            for rank in range(self._topology.world_size):
                lacking = set(each.over(rank, self._topology)) - have
                # Along an axis, a stage may do without it; part of a group may not.
                if lacking and (not each.axis or rank in have):
                    raise UsageError(
                        f"--replicated {each.text}: ranks {sorted(lacking)} have no such variable; "
                        f"say which do, such as {each.name}@tp or {each.name}@0,1"
                    )

    def _returns(self, rank: int, frame: FrameType) -> None:
        code = frame.f_code
        for each in self._declared:
            if each.name not in code.co_varnames and each.name not in code.co_cellvars:
                continue
            qualified = code.co_qualname.replace("<locals>.", "")
            if each.function and not f".{qualified}".endswith(f".{each.function}"):
                continue
            value = frame.f_locals.get(each.name)
            tensors = None if value is None else tensors_in(value)
            if tensors is None:
                continue
            seen = self._seen.setdefault((rank, each), _Seen())
            depth = 0 if each.function else self._depth(frame)
            if depth < seen.depth:
                seen.depth, seen.values = depth, []
            if depth == seen.depth:
                copies = [tensor.detach().clone() for tensor in tensors]
                at = Frame(self._script, _stored_at(code, each.name), qualified)
                seen.values.append((at, copies))

    def _values(
        self, rank: int, declared: Declared, code: CodeType, module: Mapping[str, Any]
    ) -> list[tuple[Frame, list[torch.Tensor]]]:
        if not declared.function and declared.name in module:
            tensors = tensors_in(module[declared.name])
            if tensors is None:
                kind = type(module[declared.name]).__name__
                self._problem = f"--replicated {declared.text}: it is no tensor, but a {kind}"
                return []
            return [(Frame(self._script, _stored_at(code, declared.name), "<module>"), tensors)]
        seen = self._seen.get((rank, declared), _Seen())
        functions = list(dict.fromkeys(frame.function for frame, _ in seen.values))
        if len(functions) > 1:
            one = f"{functions[0]}.{declared.name}"
            self._problem = (
                f"--replicated {declared.text}: it is a variable of {' and of '.join(functions)}; "
                f"say which, such as {one}"
            )
            return []
        return seen.values

    def _depth(self, frame: FrameType) -> int:
        depth, outer = 0, frame.f_back
        while outer is not None:
            depth += outer.f_code.co_filename == self._script
            outer = outer.f_back
        return depth


def _stored_at(code: CodeType, name: str) -> int:
    """The last line of a function that sets a variable; the first line, for a parameter."""
    line, found = code.co_firstlineno, code.co_firstlineno
    starts = {start: number for start, _, number in code.co_lines() if number is not None}
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if instruction.opname.startswith("STORE_") and instruction.argval == name:
            found = line
    return found

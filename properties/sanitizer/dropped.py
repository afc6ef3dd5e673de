"""Dropped results: a contiguous copy was reduced and thrown away; its source stays unreduced.

`dist.all_reduce(x.contiguous())` does nothing to an `x` that is not contiguous (Megatron-LM issue
5337). What proves it, all of it together:
- the reduced tensor dies inside a call, on the very line that called the collective, whose
  value is dropped, so that nobody can have read the result;
- its storage had no other owner;
- a tensor that is not contiguous and holds the same bits lives on in a local variable there.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FrameType

import torch

from properties.sanitizer import bits
from sim.calls import Call
from sim.callsite import Frame

_new_storage_owners: list[int] = []


class DroppedResults:
    """Watches reduced tensors die; holds weak references only."""

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._count = 0

    @staticmethod
    def may_drop(call: Call) -> bool:
        """Whether the line that calls drops the value of a call at all."""
        headline = call.site.headline
        return headline is not None and bool(_dropped_calls(*headline))

    def watch(self, call: Call, report: Callable[[str], None]) -> None:
        """Watch the tensor of one rank's all_reduce, before its output is written.

        Args:
            call: the rank's call, with one tensor, of which `may_drop`.
            report: called with the name of the variable that was meant, if the result is dropped.
                It must hold no tensor.
        """
        tensor = call.inputs[0][0]
        frames = call.site.frames
        if _owners(tensor) > _owners_of_new() or not bits.telling([tensor]):
            return
        print_of, shape, site = bits.digest([tensor]), tensor.shape, frames[0]
        self._count += 1
        number = self._count

        def died(_: object) -> None:
            self._watched.pop(number, None)
            frame = _frame_of(site)
            if frame is not None and _drops_a_call(frame.f_code, frame.f_lasti, site.line):
                for name, value in _strided_locals(frame):
                    if value.shape == shape and bits.digest([value]) == print_of:
                        report(name)
                        return

        self._watched[number] = weakref.ref(tensor, died)


def _owners(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _owners_of_new() -> int:
    """How many owners the storage of a tensor has that shares it with nobody."""
    if not _new_storage_owners:
        _new_storage_owners.append(_owners(torch.zeros(1, device="cpu")))
    return _new_storage_owners[0]


def _frame_of(site: Frame) -> FrameType | None:
    """The frame that now runs exactly this line, if it is the one in which the tensor died."""
    callback = sys._getframe(1)
    frame = callback.f_back
    if frame is None:
        return None
    same = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return frame if same == (site.file, site.line, site.function) else None


def _drops_a_call(code: CodeType, at: int, line: int) -> bool:
    """Whether the instruction at an offset is a call whose value is dropped, the line's only one.

    An offset may lie in the cache entries that follow an instruction.
    """
    now = max((one.offset for one in dis.get_instructions(code) if one.offset <= at), default=-1)
    return _dropped_calls(code, line) == (now,)


@functools.lru_cache(maxsize=4096)
def _dropped_calls(code: CodeType, line: int) -> tuple[int, ...]:
    """The offsets of the calls on a line whose values are dropped."""
    lines = {offset: number for offset, _, number in _line_table(code)}
    return tuple(
        one.offset
        for one, after in pairwise(dis.get_instructions(code))
        if one.opname.startswith("CALL")
        and after.opname == "POP_TOP"
        and lines.get(one.offset) == line
    )


def _line_table(code: CodeType) -> Iterator[tuple[int, int, int | None]]:
    """(offset, end, line) of each instruction unit."""
    for start, end, line in code.co_lines():
        for offset in range(start, end, 2):
            yield offset, end, line


def _strided_locals(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    """The frame's local tensors that are not contiguous, by name."""
    variables = frame.f_locals
    found = [
        (name, value)
        for name, value in variables.items()
        if isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_contiguous()
    ]
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict):
        # Python before 3.13 keeps this copy with the frame: it would hold the locals alive.
        variables.clear()
    yield from found

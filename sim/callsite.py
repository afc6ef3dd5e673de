"""Where in the caller's code a collective was called from.

A report must point at the user's line, not into torch or into this package. Code and line are
recorded when the call is made, and are turned into text only when something is printed.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_HERE = str(Path(__file__).resolve().parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_STDLIB = str(Path(sysconfig.get_path("stdlib")).resolve()) + os.sep
# Decorates torch's deprecated names, so that it stands between the caller and torch.
_WRAPPERS = ("typing_extensions.py",)
_DEPTH = 4
_INTERNAL, _PLUMBING, _CALLER = range(3)


class Frame(NamedTuple):
    """One line of the caller's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line}"


class Site:
    """Where a call was made: the innermost frames of the caller's code, the headline first."""

    __slots__ = ("_frames", "_raw")

    def __init__(self, raw: tuple[tuple[CodeType, int], ...]) -> None:
        # Which instruction of which code; its line is only looked up when it is asked for.
        self._raw = raw
        self._frames: tuple[Frame, ...] | None = None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames, the headline first; () if the caller has no code of its own."""
        if self._frames is None:
            self._frames = tuple([_frame(code, at) for code, at in self._raw])
        return self._frames

    @property
    def headline(self) -> tuple[CodeType, int] | None:
        """Code and line of the first frame, if there is one."""
        if not self._raw:
            return None
        code, at = self._raw[0]
        return code, _frame(code, at).line

    def __str__(self) -> str:
        return str(self.frames[0]) if self._raw else ""


@functools.lru_cache(maxsize=4096)
def _frame(code: CodeType, at: int) -> Frame:
    """The line of the instruction at an offset of a code."""
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return Frame(code.co_filename, next(lines, None) or code.co_firstlineno, code.co_name)


NOWHERE = Site(())


class CallSites:
    """Finds call sites, skipping torch, this package and declared plumbing.

    Args:
        plumbing: parts of file paths whose frames only pass a call on, such as
            "vllm/distributed/". They are the headline only if there is nothing else.
    """

    def __init__(self, plumbing: tuple[str, ...] = ()) -> None:
        self._plumbing = tuple(part.replace("/", os.sep) for part in plumbing)
        self._kinds: dict[str, int] = {}

    def here(self) -> Site:
        """The call site of whoever called into torch or into this package."""
        frames: list[tuple[CodeType, int]] = []
        plumbing: list[tuple[CodeType, int]] = []
        kinds = self._kinds
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(frames) < _DEPTH:
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = kinds[code.co_filename] = self._kind(code.co_filename)
            if kind == _CALLER:
                frames.append((code, frame.f_lasti))
            elif kind == _PLUMBING and not frames:
                plumbing.append((code, frame.f_lasti))
            frame = frame.f_back
        return Site(tuple(frames or plumbing))

    def is_caller(self, file: str) -> bool:
        """Whether a file is the caller's own code."""
        return self._kind(file) == _CALLER

    def _kind(self, file: str) -> int:
        if is_internal(file):
            return _INTERNAL
        return _PLUMBING if any(part in file for part in self._plumbing) else _CALLER


def is_internal(file: str) -> bool:
    """Whether a file is torch's, the standard library's or this package's."""
    path = os.path.realpath(file)
    if path.startswith((_HERE, _TORCH)) or path.endswith(_WRAPPERS) or file.startswith("<frozen"):
        return True
    return path.startswith(_STDLIB) and "-packages" + os.sep not in path


def short_path(file: str) -> str:
    """The path as a reader wants it: below site-packages or the working directory."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in file:
            return file.rsplit(marker, 1)[1]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file

"""What a fault is: a known bug that can be switched on in running code, and off without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


class UnknownFault(ValueError):
    """A name that no fault has; the message is one line with the names that are near."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A switchable bug.

    It is entered on the main thread, after vLLM's import and before a world starts, and patches
    classes or functions of the running code for as long as it is open; no file is edited.
    """

    name: str
    """Short, such as "dense-mlp-reduced-twice"."""
    report: str
    """The public report, or the statement of the brief, that it stands for."""
    mechanism: str
    """What goes wrong, in one sentence."""
    apply: Callable[[], AbstractContextManager[None]]
    """Switches it on."""
    shows: tuple[str, ...]
    """Topologies that show it, the smallest first."""
    hides: tuple[str, ...] = ()
    """Topologies of the same kind that hide it."""
    kinds: tuple[str, ...] = ()
    """The classes of fault that a right verdict may name: `Verdict.kind`."""
    at: tuple[str, ...] = ()
    """Where a right verdict may place it: parts of `Verdict.at` or of `Verdict.where`."""
    needs: tuple[tuple[str, object], ...] = ()
    """Fields of an example without which it cannot show, such as ("moe_backend", ...)."""
    limits: str = ""
    """Why the headline does not name its class or place, where it does not yet."""

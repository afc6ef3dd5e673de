"""What a script can declare: that a value is the same on all ranks of a group.

`rankfold run` checks it. Anywhere else a declaration does nothing, so that it may stay in the
script; this module loads neither torch nor anything else of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")
Listener = Callable[[Any, Any, str], None]
"""Is told the value, the group and the name of a declaration."""

_listener: Listener | None = None


def replicated(x: Value, group: Any = None, name: str = "out") -> Value:
    """Declare that a value is the same on all ranks of a group, and return it.

    It moves nothing and waits for nobody. `rankfold run` compares what the ranks declare at this
    line, the first time with the first, and so on: bit by bit, floats within the rounding of
    another order of sums. Outside of it, for example under torchrun, this does nothing.

    Args:
        x: a tensor, a number, or tensors in lists, tuples and dicts.
        group: a process group, or a device mesh of one dim; None is the default group.
        name: how to call it in a finding.
    """
    if _listener is not None:
        _listener(x, group, name)
    return x


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell the listener of all declarations, meanwhile."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before

"""Runs one of vLLM's constructors with other classes in place of those that it names.

vLLM's MiniMax-M3 names the classes of its parts in its constructors. A pull request would edit
the names there; an overlay must neither copy a constructor nor set a name of vLLM's module, which
all ranks of a process share. So the constructor's own code runs, with its own globals but for the
given names.
"""

import types
from collections.abc import Callable
from typing import Any


def rebound(method: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The bound `method`, which sees `names` instead of its module's globals of those names.

    Functions that it defines inside see them too; functions that it calls do not.
    Raises NameError if `method` mentions one of the names nowhere: then vLLM has changed.
    """
    function: Any = method.__func__  # type: ignore[attr-defined]
    if absent := set(names) - _mentioned(function.__code__):
        raise NameError(
            f"{function.__qualname__} of this vLLM does not use {', '.join(sorted(absent))}; "
            "the overlay needs a vLLM whose MiniMax-M3 does, or one with sequence parallelism"
        )
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copy, method.__self__)  # type: ignore[attr-defined]


def _mentioned(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_mentioned, inner))

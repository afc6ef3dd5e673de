"""How a command ends: with a report, by bad input, exit code 2, or by a run that broke, 3."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankfold.errors import BAD_USAGE, BROKE, FAILS, HOLDS

if TYPE_CHECKING:
    from sim import SimError


def told(report: Any, render: Callable[[Any, Any], object], *, as_json: bool) -> int:
    """Print a report of a run, as JSON or by `render`, which takes it and a console.

    Returns:
        The exit code.
    """
    from rich.console import Console

    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        render(report, Console(soft_wrap=True))
    if report.broke:
        return BROKE
    return HOLDS if report.ok else FAILS


def broke(command: str, error: SimError, *, as_json: bool) -> int:
    """Say why the run broke before there was anything to report.

    Returns:
        The exit code.
    """
    if as_json:
        print(json.dumps({"ok": False, "error": error.to_json()}, indent=2))
    print(f"rankfold {command}: the run broke: {error}", file=sys.stderr)
    return BROKE


def refuse(command: str, error: Exception) -> int:
    """Say in one line what is wrong with the input, or raise what is no matter of input.

    Returns:
        The exit code.
    """
    from model.tiny import ShapeError
    from properties.faults import UnknownFault
    from rankfold.errors import UsageError
    from sim import TopologyError

    if isinstance(error, UsageError | ShapeError | TopologyError | UnknownFault):
        print(f"rankfold {command}: {error}", file=sys.stderr)
        return BAD_USAGE
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "vllm":
        print(
            f"rankfold {command}: vLLM is not installed here; run `make setup`, or set "
            "RANKFOLD_PYTHON to a Python that has it",
            file=sys.stderr,
        )
        return BAD_USAGE
    raise error

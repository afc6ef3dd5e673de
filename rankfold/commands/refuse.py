"""Bad input ends in one line and exit code 2; anything else is a bug of ours."""

from __future__ import annotations

import sys

from rankfold.errors import BAD_USAGE


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

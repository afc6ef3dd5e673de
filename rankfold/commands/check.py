"""`rankfold check`: a topology, tap by tap against the reference."""

from __future__ import annotations

import argparse
from typing import Any

from rankfold.commands.deployment import CHECK_DEFAULTS, check_workers, of_workers
from rankfold.commands.model_options import add_model, options_of
from rankfold.commands.refuse import broke, refuse, told


def add(commands: Any) -> None:
    """Add the command to the command line."""
    check = commands.add_parser("check", help="run a topology, tap by tap against the reference")
    add_model(check)
    check.add_argument(
        "--tokens",
        default=CHECK_DEFAULTS["tokens"],
        metavar="N",
        help="tokens of the batch (default 8); DP ranks share them unevenly, or as 5,0,1 says",
    )
    check.add_argument(
        "--sequences",
        type=int,
        default=CHECK_DEFAULTS["sequences"],
        help="sequences they are cut into",
    )
    check.add_argument(
        "--requests",
        type=int,
        default=0,
        metavar="N",
        help="so many requests of different lengths, in place of --tokens and --sequences",
    )
    check.add_argument(
        "--decode", type=int, default=0, metavar="N", help="decode steps after the prompts"
    )
    check.add_argument(
        "--aux",
        default=CHECK_DEFAULTS["aux"],
        metavar="IDS",
        help="aux hidden states to capture, such as 1,3",
    )
    check.add_argument(
        "--against", metavar="TOPOLOGY", help="compare logprobs and tokens with this topology"
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.set_defaults(command=_check)


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sim import SimError

    try:
        if of_workers(arguments):
            return check_workers(arguments)
        from rankfold.check import run_check
        from rankfold.render import render

        tokens = _counts(arguments.tokens)
        options = options_of(
            arguments,
            tokens=sum(tokens),
            dp_tokens=tokens if len(tokens) > 1 else (),
            sequences=arguments.sequences,
            requests=arguments.requests,
            decode=arguments.decode,
            aux=_ids(arguments.aux),
        )
        with Console(stderr=True).status("starting") as status:
            report = run_check(options, status.update)
    except SimError as error:
        return broke("check", error, as_json=arguments.json)
    except (ValueError, ImportError) as error:
        return refuse("check", error)
    return told(report, render, as_json=arguments.json)


def _counts(text: str) -> tuple[int, ...]:
    """Numbers between commas: of tokens in all, or of each DP rank's."""
    from rankfold.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--tokens {text!r}: use a number, or one for each DP rank such as 5,0,1"
        ) from None


def _ids(text: str) -> tuple[int, ...]:
    """Numbers between commas, sorted, each once."""
    from rankfold.errors import UsageError

    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise UsageError(f"--aux {text!r}: use numbers between commas, such as 1,3") from None

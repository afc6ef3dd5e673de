"""The command line. vLLM is imported only by the commands that run it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rankfold.commands import check as checking
from rankfold.commands import faults as faulting
from rankfold.commands import generate as generating
from rankfold.commands import gpu as gpu_job
from rankfold.commands import hunt as hunting
from rankfold.commands import recipe as recipes
from rankfold.commands import worker as working
from rankfold.commands.refuse import refuse
from rankfold.errors import BAD_USAGE, BROKE, FAILS, HOLDS, INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 holds, 1 fails, 2 bad usage, 3 the run broke."""
    own, rest = _split(sys.argv[1:] if argv is None else list(argv))
    arguments = _parser().parse_args(own)
    arguments.rest = rest
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("rankfold: interrupted", file=sys.stderr)
        return INTERRUPTED


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and what follows `--` and belongs to the script of `rankfold run`."""
    if argv[:1] != ["run"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> _Parser:
    parser = _Parser(
        prog="rankfold",
        description="Fold N ranks into one process, run vLLM's MiniMax-M3 there, and find "
        "collective-communication bugs.",
        epilog="exit codes: 0 holds, 1 a check fails, 2 bad usage, 3 the run itself broke",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    checking.add(commands)
    generating.add(commands)
    script = commands.add_parser(
        "run",
        help="run any torch.distributed script on folded ranks, under the sanitizer",
        usage="rankfold run SCRIPT [--world TOPOLOGY] [--replicated NAME[@WHERE]] "
        "[--allow RULE SITE REASON] [--json] [-- ARGUMENTS OF THE SCRIPT]",
        epilog="exit codes: 0 no findings, 1 findings, 2 bad usage, 3 the run itself broke",
    )
    script.add_argument("script", help="a Python file that uses torch.distributed")
    script.add_argument("--world", default="tp4", help="topology, such as tp4 (default): 4 ranks")
    script.add_argument(
        "--replicated",
        action="append",
        default=[],
        metavar="NAME[@WHERE]",
        help="a variable of the script, or FUNCTION.NAME, that must be the same on all ranks at "
        "the end; WHERE is an axis, such as @tp, or ranks, such as @0,1",
    )
    script.add_argument(
        "--allow",
        action="append",
        nargs=3,
        default=[],
        metavar=("RULE", "SITE", "REASON"),
        help="mark findings of a rule at a site (file:line) as known to be good",
    )
    script.add_argument("--json", action="store_true", help="print the report as JSON")
    script.set_defaults(command=_run)
    hunting.add(commands)
    faulting.add(commands)
    recipes.add(commands)
    working.add(commands)
    gpu_job.add(commands)
    bench = commands.add_parser("bench", help="measure the folded runtime")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    bench.set_defaults(command=_bench)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from properties.sanitizer import Allow, AllowError
    from rankfold.errors import UsageError
    from rankfold.script import ScriptOptions, render_script, run_script
    from sim import Topology

    try:
        try:
            allow = [Allow(rule=r, site=s, reason=why) for r, s, why in arguments.allow]
        except AllowError as error:
            raise UsageError(str(error)) from None
        options = ScriptOptions(
            script=Path(arguments.script),
            topology=Topology.parse(arguments.world),
            arguments=arguments.rest,
            allow=allow,
            replicated=arguments.replicated,
            quiet=arguments.json,
        )
        report = run_script(options)
    except ValueError as error:
        return refuse("run", error)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        render_script(report, Console(soft_wrap=True))
    if report.broke is not None:
        print(f"rankfold run: the run broke: {report.broke}", file=sys.stderr)
        return BROKE
    return HOLDS if report.ok else FAILS


def _bench(arguments: argparse.Namespace) -> int:
    from rankfold.bench import run_bench

    return run_bench(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

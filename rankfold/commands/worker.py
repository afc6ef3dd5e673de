"""`rankfold worker`: another command, on ranks that torchrun has started."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankfold.commands import check as checking
from rankfold.commands import generate as generating
from rankfold.commands.refuse import refuse
from rankfold.errors import BAD_USAGE

if TYPE_CHECKING:
    from rankfold.worker import Place

Inner = Callable[[argparse.Namespace], int]


def add(commands: Any) -> None:
    """Add the command to the command line."""
    worker = commands.add_parser(
        "worker",
        help="check or generate on ranks that torchrun has started, over gloo or NCCL",
        usage="torchrun --nproc-per-node RANKS -m rankfold worker COMMAND TOPOLOGY [options]",
        epilog="rank 0 exits with the command's exit code, which torchrun reports; torchrun's own "
        "is 0, or 1 for any other",
    )
    inner = worker.add_subparsers(metavar="COMMAND", required=True)
    for each in (checking, generating):
        each.add(inner)
    # Without help it is not listed: it is for `rankfold gpu`.
    recording = inner.add_parser("record")
    recording.add_argument("topology")
    recording.add_argument("--plan", help="what `rankfold gpu` wants to be run")
    recording.add_argument("--save", help="where it finds what came of it")
    recording.set_defaults(command=_record)
    for parser in inner.choices.values():
        parser.add_argument(
            "--device",
            default="auto",
            help="auto (default): a GPU for each rank where there is one; cpu or cuda",
        )
        command: Inner = parser.get_default("command")
        parser.set_defaults(command=functools.partial(_worker, command))


def _record(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rankfold.gpu.record import record
    from sim.gloo import wire

    plan = wire.load(Path(arguments.plan).read_bytes())
    return record(plan, arguments.ran_over, Path(arguments.save))


def _worker(inner: Inner, arguments: argparse.Namespace) -> int:
    from rankfold.worker import run_worker
    from sim.launched import LaunchError

    def command(place: Place) -> int:
        arguments.transport = arguments.ran_over = place.transport
        return inner(arguments)

    try:
        return run_worker(arguments.topology, arguments.device, command)
    except LaunchError as error:
        print(f"rankfold worker: {error}", file=sys.stderr)
        return BAD_USAGE
    except (ValueError, ImportError) as error:
        return refuse("worker", error)

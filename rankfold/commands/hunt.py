"""`rankfold hunt` and `rankfold replay`: find a failing example, and run it again."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rankfold.commands.model_options import add_transport
from rankfold.commands.refuse import broke, refuse
from rankfold.errors import BROKE, FAILS, HOLDS


def add(commands: Any) -> None:
    """Add both commands to the command line."""
    hunt = commands.add_parser(
        "hunt",
        help="search for an example that fails, over all that a step depends on",
        epilog="exit codes: 0 no example fails, 1 one does, 2 bad usage, 3 the hunt itself broke",
    )
    hunt.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="TOPOLOGY",
        help="such as tep2pp2; repeatable (default: all up to 8 ranks)",
    )
    hunt.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="DIMENSION=VALUE",
        help="hold a dimension to one value, such as attention=dense or dtype=bfloat16; repeatable",
    )
    hunt.add_argument("--seconds", type=float, help="stop after so long (default 60)")
    hunt.add_argument("--examples", type=int, help="stop after so many examples")
    hunt.add_argument("--seed", type=int, default=0, help="of the search (default 0)")
    hunt.add_argument(
        "--workers", type=int, help="processes (default: one for each core, to 8; over gloo 1)"
    )
    hunt.add_argument("--fault", metavar="NAME", help="switch a known bug on, to see it found")
    hunt.add_argument(
        "--exhaustive",
        action="store_true",
        help="every case of a bounded scope, in a fixed order; goes on where it was stopped",
    )
    hunt.add_argument("--state", metavar="FILE", help="where an exhaustive hunt keeps its progress")
    hunt.add_argument(
        "--out", metavar="DIRECTORY", help="where replay files go (default .rankfold)"
    )
    add_transport(hunt)
    hunt.add_argument("--json", action="store_true", help="print the report as JSON")
    hunt.set_defaults(command=_hunt)
    replay = commands.add_parser(
        "replay",
        help="run the example of a replay file again",
        epilog="exit codes: 0 it holds now, 1 a check fails, 2 no good file, 3 the run broke",
    )
    replay.add_argument("file", help="a file that rankfold hunt has written")
    add_transport(replay)
    replay.add_argument("--json", action="store_true", help="print the report as JSON")
    replay.set_defaults(command=_replay)


def _hunt(arguments: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from hypothesis.configuration import set_hypothesis_home_dir
    from rich.console import Console

    try:
        from rankfold.hunt.report import render
        from rankfold.hunt.run import DIRECTORY, HuntOptions, run_hunt
        from rankfold.hunt.workers import WorkerDied
        from sim import Topology

        given = {} if arguments.workers is None else {"workers": arguments.workers}
        if arguments.transport == "gloo":
            given.setdefault("workers", 1)  # each has ranks of its own, which fill the cores
        options = HuntOptions(
            topologies=tuple(map(Topology.parse, arguments.topology)),
            only=tuple(arguments.only),
            seconds=arguments.seconds,
            examples=arguments.examples,
            seed=arguments.seed,
            fault=arguments.fault,
            exhaustive=arguments.exhaustive,
            state=Path(arguments.state) if arguments.state else None,
            directory=Path(arguments.out) if arguments.out else DIRECTORY,
            transport=arguments.transport,
            **given,
        )
        console = Console(stderr=True)
        try:
            # Hypothesis keeps notes on the code it has seen; they are not the user's business.
            with tempfile.TemporaryDirectory() as notes, console.status("starting") as status:
                set_hypothesis_home_dir(notes)
                report = run_hunt(options, status.update)
        except WorkerDied as error:
            print(f"rankfold hunt: {error}", file=sys.stderr)
            return BROKE
    except (ValueError, ImportError) as error:
        return refuse("hunt", error)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        render(report, Console(soft_wrap=True))
    return HOLDS if report.ok else FAILS


def _replay(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from sim import SimError

    try:
        from rankfold.render import render
        from rankfold.replay import run_replay

        with Console(stderr=True).status("starting") as status:
            replayed = run_replay(
                Path(arguments.file), status.update, transport=arguments.transport
            )
    except SimError as error:
        return broke("replay", error, as_json=arguments.json)
    except (ValueError, ImportError) as error:
        return refuse("replay", error)
    if arguments.json:
        print(json.dumps(replayed.to_json(), indent=2))
    else:
        console = Console(soft_wrap=True)
        render(replayed.report, console)
        console.print("reproduced" if replayed.reproduced else "not reproduced: see above")
    if replayed.report.broke:
        return BROKE
    return HOLDS if replayed.report.ok else FAILS

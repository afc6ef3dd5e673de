"""`rankfold faults`: the kill matrix."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rankfold.commands.model_options import add_transport
from rankfold.commands.refuse import refuse
from rankfold.errors import BROKE, FAILS, HOLDS


def add(commands: Any) -> None:
    """Add the command to the command line."""
    faults = commands.add_parser(
        "faults",
        help="switch known bugs on, one by one, and see which check catches which",
        epilog="exit codes: 0 every fault is caught and no control flagged, 1 not so, 2 bad usage, "
        "3 the run itself broke",
    )
    faults.add_argument(
        "names", nargs="*", metavar="NAME", help="faults (default: all, and controls)"
    )
    faults.add_argument("--list", action="store_true", help="list the faults, without running them")
    faults.add_argument("--workers", type=int, help="processes (default: one for each core, to 8)")
    faults.add_argument("--markdown", metavar="FILE", help="write the matrix as a page, too")
    add_transport(faults)
    faults.add_argument("--json", action="store_true", help="print the matrix as JSON")
    faults.set_defaults(command=_faults)


def _faults(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    try:
        from rankfold.errors import UsageError
        from rankfold.faults.matrix import run_matrix
        from rankfold.faults.report import listing, render, to_json
        from rankfold.hunt.workers import WorkerDied, default_workers

        if arguments.list:
            return _list(listing(), as_json=arguments.json)
        workers = arguments.workers
        if workers is None:
            workers = default_workers()
        if workers < 1:
            raise UsageError(f"--workers {workers}: use 1 or more")
        try:
            with Console(stderr=True).status("starting") as status:
                matrix = run_matrix(
                    arguments.names, workers, status.update, transport=arguments.transport
                )
        except WorkerDied as error:
            print(f"rankfold faults: {error}", file=sys.stderr)
            return BROKE
        if arguments.markdown:
            _write(arguments.markdown, matrix)
    except (ValueError, ImportError) as error:
        return refuse("faults", error)
    if arguments.json:
        print(json.dumps(to_json(matrix), indent=2))
    else:
        render(matrix, Console(soft_wrap=True))
    return HOLDS if matrix.ok else FAILS


def _list(faults: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"faults": faults}, indent=2))
        return HOLDS
    for fault in faults:
        print(f"{fault['name']} ({fault['class']}; {fault['report']}): {fault['mechanism']}")
    return HOLDS


def _write(path: str, matrix: Any) -> None:
    import datetime
    import importlib.metadata
    from pathlib import Path

    from rankfold.faults.report import to_markdown
    from rankfold.files import write_whole

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "torch"))
    text = to_markdown(matrix, datetime.date.today().isoformat(), versions)
    write_whole(Path(path), text)

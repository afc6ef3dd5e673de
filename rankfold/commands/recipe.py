"""`rankfold recipe`: lint deployment recipes, tell two of them apart, and run one folded."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rankfold.commands.deployment import add_run
from rankfold.errors import BAD_USAGE, FAILS, HOLDS


def add(commands: Any) -> None:
    """Add the command and its forms to the command line."""
    recipe = commands.add_parser(
        "recipe", help="lint deployment recipes, compare two, run one folded"
    )
    forms = recipe.add_subparsers(metavar="FORM", required=True)
    lint = forms.add_parser(
        "lint",
        help="say where a recipe or a master configuration does not mean what it says",
        epilog="exit codes: 0 nothing found, 1 findings, 2 bad usage or no readable recipe",
    )
    lint.add_argument(
        "files", nargs="+", metavar="FILE", help="srt-slurm recipes and master configurations"
    )
    lint.add_argument(
        "--recipes",
        metavar="DIR",
        help="the folder that CONFIG_FILE calls recipes (default: looked for above the file)",
    )
    form = lint.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--sarif", action="store_true", help="print it as SARIF 2.1.0, for reviews")
    lint.set_defaults(command=_lint)
    diff = forms.add_parser(
        "diff",
        help="say in words what changed from one recipe to another",
        epilog="exit codes: 0 compared, whether they differ or not, 2 bad usage or no readable "
        "recipe",
    )
    diff.add_argument("before", metavar="A", help="a recipe or a master configuration")
    diff.add_argument("after", metavar="B", help="another of the same kind")
    diff.add_argument("--json", action="store_true", help="print the difference as JSON")
    diff.set_defaults(command=_diff)
    add_run(forms)


def _lint(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rankfold.errors import UsageError
    from rankfold.recipe.lint import lint
    from rankfold.recipe.report import lines, to_json
    from rankfold.recipe.sarif import to_sarif

    try:
        recipes = Path(arguments.recipes) if arguments.recipes else None
        if recipes is not None and not recipes.is_dir():
            raise UsageError(f"--recipes {arguments.recipes}: is no folder")
        report = lint(arguments.files, recipes)
    except UsageError as error:
        return _refuse("lint", error)
    if arguments.sarif:
        print(json.dumps(to_sarif(report), indent=2))
    elif arguments.json:
        print(json.dumps(to_json(report), indent=2))
    else:
        for line in lines(report):
            print(line)
    return HOLDS if report.ok else FAILS


def _diff(arguments: argparse.Namespace) -> int:
    from rankfold.errors import UsageError
    from rankfold.recipe.diff import compare, lines
    from rankfold.recipe.loader import read

    try:
        before, after = read(arguments.before), read(arguments.after)
        difference = compare(before, after)
    except UsageError as error:
        return _refuse("diff", error)
    if arguments.json:
        print(json.dumps(difference.to_json(), indent=2))
    else:
        for line in lines(before, after, difference):
            print(line)
    return HOLDS


def _refuse(form: str, error: Exception) -> int:
    print(f"rankfold recipe {form}: {error}", file=sys.stderr)
    return BAD_USAGE

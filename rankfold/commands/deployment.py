"""`rankfold recipe run`, and `rankfold check` of several workers: requests on a deployment."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rankfold.commands.model_options import add_sizes, sizes_of
from rankfold.commands.refuse import broke, refuse, told

if TYPE_CHECKING:
    from rankfold.deployment.recipe import Folded

CHECK_DEFAULTS = {"tokens": "8", "sequences": 1, "aux": ""}
"""Of `rankfold check`: what has to stay as it is where requests are served."""


def add_run(forms: Any) -> None:
    """Add `recipe run`."""
    run = forms.add_parser(
        "run",
        help="fold a recipe's workers with a tiny model, and serve requests on them with all "
        "checks",
        epilog="exit codes: 0 holds, 1 a check fails, 2 bad usage or no readable recipe, 3 the run "
        "itself broke",
    )
    run.add_argument("recipe", metavar="FILE", help="a recipe, or a word such as 3p1d-dep2-dep16")
    run.add_argument(
        "--against", metavar="OTHER", help="a recipe or a word that serves the same requests"
    )
    run.add_argument(
        "--requests", type=int, default=32, metavar="N", help="requests to serve (default 32)"
    )
    run.add_argument(
        "--decode",
        type=int,
        default=8,
        metavar="N",
        help="most decode steps of a request (default 8)",
    )
    run.add_argument(
        "--calm",
        action="store_true",
        help="hand KV caches over without losing, repeating, delaying or reordering pieces",
    )
    add_sizes(run)
    # Prompts in two or three chunks: some are prefilled while others decode.
    run.set_defaults(chunk=8)
    run.add_argument("--json", action="store_true", help="print the report as JSON")
    run.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        folded, against = _folded(arguments.recipe, arguments.against)
    except ValueError as error:
        return refuse("recipe run", error)
    if arguments.moe_backend == "auto":
        arguments.moe_backend = folded.moe_backend
    return _serve("recipe run", arguments, folded, against, even=False)


def of_workers(arguments: argparse.Namespace) -> bool:
    """Whether `rankfold check` is asked for several workers, or for requests on DP ranks.

    Raises:
        TopologyError, UsageError: a word makes no sense.
    """
    from rankfold.deployment.fleet import Deployment, is_deployment

    words = [word for word in (arguments.topology, arguments.against) if word]
    in_steps = arguments.requests or arguments.decode or arguments.chunk
    return any(map(is_deployment, words)) or bool(
        in_steps and any(Deployment.parse(word).decode.topology.dp > 1 for word in words)
    )


def check_workers(arguments: argparse.Namespace) -> int:
    """`rankfold check` of several workers, or of requests on DP ranks.

    Returns:
        The exit code.
    """
    from rankfold.errors import UsageError

    try:
        for option, default in CHECK_DEFAULTS.items():
            if getattr(arguments, option) != default:
                raise UsageError(
                    f"--{option}: requests on several DP ranks or workers have lengths of their "
                    "own; use --requests, or one topology and one step"
                )
        folded, against = _folded(arguments.topology, arguments.against)
    except ValueError as error:
        return refuse("check", error)
    if not arguments.requests:
        arguments.requests = 2 * sum(
            fleet.workers * fleet.topology.dp for fleet in folded.deployment.fleets.values()
        )
    arguments.calm = False
    return _serve("check", arguments, folded, against, even=True)


def _folded(text: str, against: str | None) -> tuple[Folded, Folded | None]:
    """What to serve on, and what to compare with, if anything is."""
    from rankfold.deployment.recipe import deployment_or_recipe

    return deployment_or_recipe(text), deployment_or_recipe(against) if against else None


def _serve(
    command: str,
    arguments: argparse.Namespace,
    folded: Folded,
    against: Folded | None,
    *,
    even: bool,
) -> int:
    """Serve requests on a deployment and tell what came of it.

    Args:
        command: for messages.
        arguments: with the sizes of the model, the requests and what goes wrong with hand-overs.
        folded, against: what to serve on, and to compare with.
        even: whether all requests have as many decode steps.

    Returns:
        The exit code.
    """
    from rich.console import Console

    from sim import SimError

    try:
        from model.handover.wire import Disturbance
        from rankfold.deployment.check import check_deployment, shared
        from rankfold.deployment.drive import Load
        from rankfold.deployment.load import mixed_load
        from rankfold.deployment.render import render
        from rankfold.options import Options

        both = [folded.deployment, *([against.deployment] if against else [])]
        sizes = sizes_of(arguments)
        stages = max(t.pp for each in both for t in each.topologies)
        while len(sizes["layers"]) < stages:
            sizes["layers"] += sizes["layers"]
        options = shared(Options(topology=both[0].decode.topology, **sizes), both)
        load = Load(
            requests=mixed_load(
                arguments.requests, arguments.decode, options.tiny, options.seed, even=even
            ),
            chunk=arguments.chunk,
            disturbance=None if arguments.calm else Disturbance(seed=options.seed),
        )
        with Console(stderr=True).status("starting") as status:
            report = check_deployment(
                options,
                folded.deployment,
                load,
                status.update,
                against=both[1] if against else None,
                notes=folded.notes,
                recipe=folded.path or None,
            )
    except SimError as error:
        return broke(command, error, as_json=arguments.json)
    except (ValueError, ImportError) as error:
        return refuse(command, error)
    return told(report, render, as_json=arguments.json)

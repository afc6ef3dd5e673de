"""`rankfold gpu`: the gated job for machines with GPUs, and for results of full-scale runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rankfold.commands.refuse import broke, refuse
from rankfold.errors import BROKE, FAILS, HOLDS

FOLDER = ".rankfold/gpu"


def add(commands: Any) -> None:
    """Add the command to the command line."""
    gpu = commands.add_parser(
        "gpu",
        help="run on this machine's GPUs over NCCL, compare with folded ranks, judge full-scale "
        "results",
        epilog="exit codes: 0 no check fails (checks that were not run are N/A, with the reason), "
        "1 a check fails, 2 bad usage, 3 a launch broke",
    )
    gpu.add_argument(
        "--topology",
        action="append",
        metavar="TOPOLOGY",
        help="only this one, and more if given again (default: tp1, tp2, pp2, tep2, tp2pp2, "
        "tep2pp2, tp4, tep4)",
    )
    gpu.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu"),
        help="auto (default): only where there is a GPU; cpu: the same over gloo, without GPUs",
    )
    gpu.add_argument("--attention", default="dense", help="dense (default), sparse or model")
    gpu.add_argument(
        "--read",
        nargs="+",
        action="extend",
        default=[],
        metavar="[ARM=]FILE",
        help="results of full-scale runs: GSM8K, prompt logprobs, throughput; ARM says what ran",
    )
    gpu.add_argument(
        "--threshold",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="gsm8k (0.9), logprob_delta (0) or throughput_loss (0.05)",
    )
    gpu.add_argument("--no-timing", action="store_true", help="measure no step times")
    gpu.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="for one launch (600)"
    )
    gpu.add_argument(
        "--out", default=FOLDER, metavar="DIR", help=f"for the report and the logs ({FOLDER})"
    )
    gpu.add_argument("--json", action="store_true", help="print the report as JSON")
    gpu.set_defaults(command=_gpu)


def _gpu(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sim import SimError

    try:
        from rankfold.gpu.run import Job, run_job
        from rankfold.gpu.thresholds import Thresholds

        job = Job(
            folder=Path(arguments.out),
            topologies=arguments.topology,
            device=arguments.device,
            attention=arguments.attention,
            files=arguments.read,
            thresholds=Thresholds.of(arguments.threshold),
            timing=not arguments.no_timing,
            limit=arguments.limit,
        )
        with Console(stderr=True).status("starting") as status:
            report = run_job(job, status.update)
    except SimError as error:
        return broke("gpu", error, as_json=arguments.json)
    except (ValueError, ImportError) as error:
        return refuse("gpu", error)
    written = report.write(job.folder)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print("\n".join(report.lines()))
        print(f"\nwritten: {written[0]}, {written[1]}")
    if any(ran.broke for ran in report.launches):
        return BROKE
    return HOLDS if report.ok else FAILS

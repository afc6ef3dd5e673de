"""A deployment's report for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankfold.deployment.report import DeploymentReport
from rankfold.render import print_checks, taps_table


def render(report: DeploymentReport, console: Console) -> None:
    """Print the workers, the hand-overs, the checks and the verdict."""
    subject = report.subject
    prompts = [len(request.prompt) for request in report.requests]
    tokens = sum(len(request.tokens) for request in report.requests)
    about = f"{report.recipe}: " if report.recipe else ""
    console.print(Text(f"{about}{report.topology}", style="bold"), end="")
    console.print(
        f": {report.ranks} {report.transport} ranks, layers {report.layers}, "
        f"{report.attention} attention, {report.dtype}, seed {report.seed}"
    )
    if prompts:
        console.print(
            f"{len(prompts)} requests, prompts of {min(prompts)} to {max(prompts)} tokens, "
            f"{tokens} tokens sampled"
        )
    console.print(
        f"subject: vLLM {subject.vllm}, {subject.model} MiniMax-M3, experts {subject.moe_backend}, "
        f"sequence parallelism {'on' if subject.sequence_parallel else 'off'}"
    )
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))
    console.print()
    console.print(_fleets(report))
    if (hands := report.hand_overs) is not None:
        console.print(
            f"hand-overs: {hands.whole} whole, {hands.given_up} given up and begun again; "
            f"{hands.pieces:,} pieces, {hands.bytes:,} bytes: {hands.lost} lost, "
            f"{hands.late} late, {hands.repeated} repeated, {hands.stale} stale"
        )
    console.print(taps_table(report.taps))
    print_checks(report.checks, console)
    if report.against is not None:
        same = "the same tokens" if report.against.same_tokens else "other tokens"
        console.print(
            f"against {report.against.topology}: {same}, largest difference of a logprob "
            f"{report.against.max_abs_delta:.2g} (bound {report.against.bound:.2g})"
        )
    style = "bold green" if report.ok else "bold red"
    console.print(Text(f"\n{report.headline}  ({report.seconds:.1f} s)", style))


def _fleets(report: DeploymentReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("workers")
    table.add_column("topology")
    for name in ("steps", "requests a DP rank", "collectives", "bytes"):
        table.add_column(name, justify="right")
    for side, fleet in report.fleets.items():
        counts = fleet.requests_by_lane.values()
        table.add_row(
            f"{fleet.workers} {side}",
            fleet.topology,
            ", ".join(map(str, fleet.steps)),
            f"{min(counts)} to {max(counts)}",
            f"{fleet.ledger.collectives:,}",
            f"{fleet.ledger.bytes:,}",
        )
    return table

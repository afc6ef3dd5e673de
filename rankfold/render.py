"""A report for a person: a short table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from properties import TapVerdict, Verdict
from rankfold.report import Report


def render(report: Report, console: Console) -> None:
    """Print the taps, the traffic, the checks and the verdict."""
    subject = report.subject
    console.print(
        f"[bold]{report.topology}[/]: {report.ranks} {report.transport} ranks, "
        f"{_tokens(report)}, layers {report.layers}, {report.attention} attention, "
        f"{report.dtype}, seed {report.seed}"
    )
    if report.steps:
        console.print(_plan(report))
    console.print(
        f"subject: vLLM {subject.vllm}, {subject.model} MiniMax-M3, experts "
        f"{subject.moe_backend}, "
        f"sequence parallelism {'on' if subject.sequence_parallel else 'off'}\n"
    )
    console.print(taps_table(_shown(report)))
    console.print(_traffic(report))
    print_checks(report.checks, console)
    style = "bold green" if report.ok else "bold red"
    console.print(Text(f"\n{report.headline}  ({report.seconds:.1f} s)", style))


def print_checks(checks: Sequence[Verdict], console: Console) -> None:
    """Print each check in a line, and where and why one fails."""
    for check in checks:
        mark = Text("holds", "green") if check.ok else Text("FAILS", "bold red")
        console.print(mark, Text(f" {check.name}: {check.what}"))
        if not check.ok:
            console.print(Text(f"       where: {check.where}"))
            console.print(Text(f"       why:   {check.why}"))


def _plan(report: Report) -> str:
    """The requests and their steps, in one line."""
    prompts = ", ".join(str(len(request.prompt)) for request in report.requests)
    decodes = sum(any(part["decode"] for part in step.parts) for step in report.steps)
    plural = "s" if len(report.requests) > 1 else ""
    return (
        f"{len(report.requests)} request{plural}, prompts of {prompts} tokens: "
        f"{len(report.steps)} steps, {decodes} of them with tokens to decode"
    )


def _tokens(report: Report) -> str:
    by_dp_rank = report.tokens_by_dp_rank
    if not by_dp_rank:
        return f"{report.tokens} tokens"
    return f"{report.tokens} tokens on DP ranks ({', '.join(map(str, by_dp_rank))})"


def _shown(report: Report) -> list[TapVerdict]:
    """The taps; where DP ranks have one each, the first wrong one or else the nearest to its
    bound."""
    if not report.tokens_by_dp_rank:
        return report.taps
    worst: dict[str, TapVerdict] = {}
    for tap in report.taps:
        name = tap.name.partition(".")[2]
        best = worst.setdefault(name, tap)
        if best.ok and (not tap.ok or _share(tap) > _share(best)):
            worst[name] = tap
    return list(worst.values())


def _share(tap: TapVerdict) -> float:
    return tap.max_abs_err / tap.bound if tap.bound else 0.0


def taps_table(taps: Sequence[TapVerdict]) -> Table:
    """The taps with their errors and bounds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tap")
    table.add_column("expected")
    table.add_column("largest error", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for tap in taps:
        table.add_row(
            tap.name,
            tap.expected,
            f"{tap.max_abs_err:.1e}",
            f"{tap.bound:.1e}",
            "" if tap.ok else Text("wrong", "bold red"),
        )
    return table


def _traffic(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="")
    for name in ("op", "group"):
        table.add_column(name)
    for name in ("count", "bytes"):
        table.add_column(name, justify="right")
    for op, of_op in report.ledger.by_op.items():
        for group, part in of_op.groups.items():
            table.add_row(op, group, str(part["count"]), f"{part['bytes']:,}")
    total = report.ledger
    table.add_row("all", "", str(total.collectives), f"{total.bytes:,}", style="dim")
    return table

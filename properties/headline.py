"""Which of several failed checks to read first, and the verdicts that sum up others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from properties.oracle import TapVerdict
from properties.sanitizer.finding import Finding
from properties.verdict import Verdict
from sim import SimError

BROKEN_BY = {
    "deadlock": "ledger",
    "mismatch": "ledger",
    "undelivered": "ledger",
    "not_a_member": "ledger",
    "buffer_reuse": "delivery",
}
"""Which check it is that a broken run fails, by the error's kind; "run" for a rank that raised."""


def headline(checks: Sequence[Verdict], taps: Sequence[TapVerdict]) -> Verdict | None:
    """The failed check to read first: what it is about comes first in the program.

    Of checks about the same place, the one that stands first in `checks`: they go from the cause
    to what it does.
    """
    order = {tap.name: i for i, tap in enumerate(taps)}

    def position(verdict: Verdict) -> float:
        if verdict.name == "parameters":
            # Nothing can be right after wrong weights.
            return -1
        if verdict.at in order:
            # An aux hidden state may be seen earlier, where a stage hands it on.
            seen = [i for i, tap in enumerate(taps) if "aux" in tap.name and not tap.ok]
            aux = re.match(r"(dp\d+\.)?aux\.", verdict.at) and verdict.name == "aliasing"
            return min([order[verdict.at], *(seen if aux else [])])
        if layer := re.search(r"(dp\d+\.)?layers\.\d+", verdict.at):
            # A module of a layer: before all taps of the layer.
            within = layer.group() + "."
            return next((i for name, i in order.items() if name.startswith(within)), len(order))
        return len(order)

    failed = [check for check in checks if not check.ok]
    return min(failed, key=position) if failed else None


def oracle(taps: Sequence[TapVerdict]) -> Verdict:
    """The first wrong tap in program order is the headline; the rest follows from it."""
    wrong = [tap for tap in taps if not tap.ok]
    if not wrong:
        return Verdict(
            name="oracle",
            ok=True,
            what=f"{len(taps)} taps are within their rounding bounds of the float64 reference",
        )
    first, rest = wrong[0], len(wrong) - 1
    follows = f"; {rest} later taps follow from it" if rest else ""
    return Verdict(
        name="oracle",
        ok=False,
        what=f"{first.name} is off by {first.max_abs_err:.3g} (bound {first.bound:.2g})",
        where=f"{first.name}, expected {first.expected}; {first.where}",
        why=first.why + follows,
        kind=first.kind,
        at=first.name,
        rows=first.rows,
    )


def broken(error: SimError) -> Verdict:
    """The step did not come to its end."""
    headline, *ranks = str(error).splitlines()
    return Verdict(
        name=BROKEN_BY.get(error.kind, "run"),
        ok=False,
        what=f"the step broke: {headline}",
        where="; ".join(line.strip() for line in ranks),
        why="see the first wrong tap, if there is one: it may be the cause",
        kind=error.kind,
        at=first_site(error),
    )


def first_site(error: SimError) -> str:
    """The operation and source line of the first rank that an error reports, if it has one."""
    for rank in error.ranks:
        if rank.operation or rank.site:
            return f"{rank.operation} at {rank.site}".strip()
    return ""


def sanitizer(findings: Sequence[Finding]) -> Verdict:
    """The first wrong operation, as seen from the operands alone."""
    found = [finding for finding in findings if finding.allowed is None]
    name = "sanitizer"
    if not found:
        return Verdict(name=name, ok=True, what="no operation is wrong by its operands")
    first, rest = found[0], len(found) - 1
    more = f"; {rest} more such findings" if rest else ""
    return Verdict(
        name=name,
        ok=False,
        what=first.what,
        where=first.where,
        why=first.why + more,
        kind=first.rule,
        at=first.operation,
    )

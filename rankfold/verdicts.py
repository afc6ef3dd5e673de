"""The checks of `rankfold check` as verdicts."""

from __future__ import annotations

from properties import Verdict
from rankfold import report
from rankfold.options import Options
from rankfold.run import Outcome
from rankfold.truth import Truth
from sim import Ledger


def sequence_parallel(options: Options, outcome: Outcome) -> Verdict:
    """The stream is sharded by token exactly where it has to be."""
    wanted, found = options.shards_stream, bool(outcome.facts["sequence_parallel"])
    name, where = "sequence parallelism", f"{options.topology}, {options.moe_backend}"
    if wanted == found:
        return Verdict(name=name, ok=True, what=f"is {'on' if found else 'off'}, as it has to be")
    return Verdict(
        name=name,
        ok=False,
        what=f"is {'on' if found else 'off'}, and has to be {'on' if wanted else 'off'}",
        where=where,
        why="it is on for EP, TP > 1 and MegaMoE, at every number of stages",
        kind="sequence parallelism",
        at="layers.0",
    )


def routing(truth: Truth) -> Verdict:
    """Every token went to its best experts, near ties aside."""
    rejected = truth.routing_rejected
    if not rejected:
        return Verdict(name="routing", ok=True, what="every token went to its best experts")
    layer, token = rejected[0]
    return Verdict(
        name="routing",
        ok=False,
        what=f"{len(rejected)} tokens were routed to experts that are not the best",
        where=f"layers.{layer}.experts_chosen, token {token}",
        why="the choice differs by more than rounding can explain: wrong router input, bias or ids",
        kind="wrong experts",
        at=f"layers.{layer}.experts_chosen",
    )


def agreement(ledger: Ledger) -> Verdict:
    """The runtime has compared every operation on all ranks of its group, or the run had broken."""
    groups = {(entry.group, entry.ranks) for entry in ledger.entries}
    return Verdict(
        name="ledger",
        ok=True,
        what=f"{len(ledger)} operations on {len(groups)} groups agree; nothing is pending",
    )


def against(a: Outcome, b: Outcome, bound: float) -> tuple[Verdict, report.Against]:
    """The logprobs of two topologies: equal bits for the same TP, DP and EP, else within bound.

    Args:
        a, b: the two runs.
        bound: largest error of one of them that rounding can explain.
    """
    exact = _columns(a) == _columns(b)
    deltas = (a.logprobs.double() - b.logprobs.double()).abs()
    delta = float(deltas.max()) if deltas.numel() else 0.0
    allowed = 0.0 if exact else 2 * bound
    how = "bit for bit" if exact else f"within rounding ({allowed:.2g})"
    ok = delta <= allowed
    verdict = Verdict(
        name="against",
        ok=ok,
        what=f"logprobs of {a.topology} and {b.topology} "
        + (f"are equal {how}" if ok else f"differ by {delta:.3g}, not equal {how}"),
        where="" if ok else "logprobs",
        why="" if ok else "the same TP degree sums the same terms in the same order",
        kind="" if ok else "topologies differ",
        at="" if ok else "logprobs",
    )
    return verdict, report.Against(topology=b.topology.word, max_abs_delta=delta, bound=allowed)


def _columns(outcome: Outcome) -> tuple[int, int, bool]:
    """What decides the order of sums."""
    return outcome.topology.tp, outcome.topology.dp, outcome.topology.ep


def traffic(ledger: Ledger) -> report.Traffic:
    """The ledger in summary."""
    by_op: dict[str, report.OpTraffic] = {}
    for (group, op), (count, size) in ledger.totals().items():
        of_op = by_op.setdefault(op, report.OpTraffic())
        of_op.count += count
        of_op.bytes += size
        of_op.groups[group] = {"count": count, "bytes": size}
    return report.Traffic(
        collectives=len(ledger), bytes=sum(of_op.bytes for of_op in by_op.values()), by_op=by_op
    )

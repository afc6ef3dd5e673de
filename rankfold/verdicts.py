"""The checks of `rankfold check` as verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from model.batch import Batch
from properties import TapVerdict, Verdict
from properties.relations import spans
from rankfold import report
from rankfold.options import Options
from rankfold.run import Outcome
from rankfold.truth import Truth, routing_of, selection_of
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
        rows=tuple(row for at, row in rejected if at == layer),
    )


def selection(truth: Truth, taps: Sequence[TapVerdict]) -> Verdict:
    """Every token attends to its best blocks of keys, near ties aside.

    Args:
        truth: with what was chosen and must not have been.
        taps: of the step, where the choice of a layer is explained.
    """
    rejected = truth.selection_rejected
    if not rejected:
        return Verdict(name="selection", ok=True, what=selected(truth))
    layer = rejected[0][0]
    at = f"layers.{layer}.blocks_chosen"
    rows = tuple(row for of, row in rejected if of == layer)
    tap = next((tap for tap in taps if tap.name == at and not tap.ok), None)
    return Verdict(
        name="selection",
        ok=False,
        what=f"{len(rows)} tokens attend to blocks that are not the best",
        where=f"{at}, " + (tap.where if tap else f"token {rows[0]}"),
        why=tap.why if tap else "the choice differs by more than rounding can explain",
        kind=tap.kind if tap else "wrong blocks",
        at=at,
        rows=rows,
    )


def selected(*truths: Truth) -> str:
    """How many choices of blocks drop some, in words."""
    dropped = choices = 0
    for truth in truths:
        for name, chosen in truth.taps.items():
            if name.endswith(".blocks_chosen") and chosen.numel():
                # A token's own block is always chosen, so the last id tells how many there are.
                dropped += int((chosen.amax(-1) + 1 > (chosen >= 0).sum(-1)).sum())
                choices += chosen.shape[0] * chosen.shape[1]
    return f"every token attends to its best blocks; {dropped} of {choices} choices drop some"


def agreement(ledger: Ledger) -> Verdict:
    """The runtime has compared every operation on all ranks of its group, or the run had broken."""
    groups = {(entry.group, entry.ranks) for entry in ledger.entries}
    return Verdict(
        name="ledger",
        ok=True,
        what=f"{len(ledger)} operations on {len(groups)} groups agree; nothing is pending",
    )


def against(
    options: Options, batch: Batch, a: Outcome, b: Outcome, bound: float
) -> tuple[Verdict, report.Against]:
    """The logprobs of two topologies: equal bits for the same TP, DP and EP, else within bound.

    Within rounding, a near tie between experts or blocks may fall the other way. From such a row on
    a sequence is not compared; whether each run's own choice was right is another check.

    Args:
        options: the model.
        batch: what both ran.
        a, b: the two runs.
        bound: largest error of one of them that rounding can explain.
    """
    exact = _columns(a) == _columns(b)
    deltas = (a.logprobs.double() - b.logprobs.double()).abs()
    ties = [] if exact else _chose_otherwise(options, batch, a, b)
    deltas[ties] = 0.0
    delta = float(deltas.max()) if deltas.numel() else 0.0
    allowed = 0.0 if exact else 2 * bound
    how = "bit for bit" if exact else f"within rounding ({allowed:.2g})"
    but = f", but for {len(ties)} rows from a near tie on" if ties else ""
    ok = delta <= allowed
    verdict = Verdict(
        name="against",
        ok=ok,
        what=f"logprobs of {a.topology} and {b.topology} "
        + (f"are equal {how}{but}" if ok else f"differ by {delta:.3g}, not equal {how}"),
        where="" if ok else "logprobs",
        why="" if ok else "the same TP degree sums the same terms in the same order",
        kind="" if ok else "topologies differ",
        at="" if ok else "logprobs",
    )
    return verdict, report.Against(topology=b.topology.word, max_abs_delta=delta, bound=allowed)


def _chose_otherwise(options: Options, batch: Batch, a: Outcome, b: Outcome) -> list[int]:
    """The rows where two runs chose other experts or blocks, and the later ones of their
    sequences."""
    rows: set[int] = set()
    for chosen_of in (routing_of, selection_of):
        mine, theirs = (chosen_of(options, batch, outcome) for outcome in (a, b))
        for layer in mine.keys() & theirs.keys():
            differs = (mine[layer] != theirs[layer]).flatten(1).any(dim=1)
            rows |= set(differs.nonzero().flatten().tolist())
    return sorted(
        {
            later
            for start, end in spans(batch)
            for row in rows
            if start <= row < end
            for later in range(row, end)
        }
    )


def _columns(outcome: Outcome) -> tuple[int, int, bool]:
    """What decides the order of sums."""
    return outcome.topology.tp, outcome.topology.dp, outcome.topology.ep


def traffic(*ledgers: Ledger) -> report.Traffic:
    """The ledgers of some steps in summary."""
    by_op: dict[str, report.OpTraffic] = {}
    for (group, op), (count, size) in (
        total for each in ledgers for total in each.totals().items()
    ):
        of_op = by_op.setdefault(op, report.OpTraffic())
        of_op.count += count
        of_op.bytes += size
        of_group = of_op.groups.setdefault(group, {"count": 0, "bytes": 0})
        of_group["count"] += count
        of_group["bytes"] += size
    return report.Traffic(
        collectives=sum(map(len, ledgers)),
        bytes=sum(of_op.bytes for of_op in by_op.values()),
        by_op=by_op,
    )

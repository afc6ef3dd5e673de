"""One batch and another that is related to it: rows that mean the same have the same values.

A token's values depend on the tokens before it in its own sequence, and on nothing else. So

| relation | rows that stay | how exactly |
|---|---|---|
| the tokens of one sequence are other ones | all other sequences' | bit for bit |
| tokens up to a sequence's end are other ones | earlier rows, and others' | bit for bit |
| the sequences come in another order | all, at their new places | within rounding |
| the batch is cut into two steps | all | within rounding |

Bit for bit: every operation sees the same shapes, so a row goes through the same instructions
whatever the other rows hold. MegaMoE is the exception: each expert's GEMM takes the rows that chose
it, so its shape, and with it the order of a sum, depends on the other rows; from the first such
block on, values agree within rounding. Within rounding: within the sum of the bounds of the two
runs, each a bound on a run's distance from the exact values, which are the same for both.

Rounding may turn a near tie between experts, or between blocks of keys. A row that then goes to
other ones, and the rows of its sequence after it, which attend to it, are not compared from there
on: whether each run's own choice was right is the business of the checks on routing and selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from properties.captured import Captured
from properties.placement import Placement, PlacementError
from properties.relations import Relation, spans
from properties.verdict import Verdict
from sim import Topology
from sim.buffers import bits

_NAME = "metamorphic"
_CHOICES = (".experts_chosen", ".blocks_chosen")
"""Taps that hold what was chosen; all others hold values."""
Taps = Sequence[Mapping[str, Captured]]
"""Each rank's taps, by rank, in program order."""


def rows_stay(
    relation: Relation,
    topology: Topology,
    base: Taps,
    derived: Sequence[Taps],
    *,
    grouped_experts: bool,
    bounds: Sequence[Mapping[str, float]] | None = None,
) -> Verdict:
    """Judge the runs of a relation's batches.

    Args:
        relation: the batches.
        topology: the ranks' layout.
        base: the taps of the base batch.
        derived: the taps of the derived batches, in their order.
        grouped_experts: whether experts compute the rows that chose them together, as MegaMoE
            does.
        bounds: the largest error that rounding explains, by tap, of the base and then of each
            derived batch. Without it only what agrees bit for bit is judged; the verdict says how
            many taps that were.
    """
    names = list(dict.fromkeys(name for taps in base for name in taps))
    exact, within = 0, 0
    grouped = False
    excused: set[int] = set()
    for name in names:
        grouped = grouped or (grouped_experts and _is_moe_output(name, names))
        runs = list(zip(derived, relation.rows, strict=True))
        if relation.in_place and not grouped:
            exact += 1
            bad = _changed(name, topology, relation, base, derived[0])
            if bad:
                return _fails(relation, name, bad, "", names)
            continue
        if bounds is None:
            continue
        if name.endswith(_CHOICES):
            for j, (taps, pairs) in enumerate(runs):
                excused |= _rerouted(name, topology, relation, base, (j, taps), pairs)
        elif all(name in of_run for of_run in bounds):
            within += 1
            for j, (taps, pairs) in enumerate(runs):
                allowed = bounds[0][name] + bounds[j + 1][name]
                kept = [pair for pair in pairs if pair[0] not in excused]
                bad, worst = _moved(name, topology, relation, base, (j, taps), kept, allowed)
                if bad:
                    size = f"by {worst:.3g}, where rounding explains {allowed:.2g}"
                    return _fails(relation, name, bad, size, names)
    left = len(names) - exact - within
    parts = [f"{exact} taps keep the bits of the other rows" if exact else ""]
    parts.append(f"{within} taps keep their rows within rounding" if within else "")
    parts.append(f"{left} are not compared" if left else "")
    return Verdict(
        name=_NAME,
        ok=True,
        what=f"when {relation.change}: {', '.join(filter(None, parts)) or 'there are no taps'}",
    )


def _is_moe_output(name: str, names: Sequence[str]) -> bool:
    return name.endswith(".ffn") and f"{name.removesuffix('ffn')}router" in names


def _changed(
    name: str, topology: Topology, relation: Relation, base: Taps, derived: Taps
) -> dict[int, list[int]]:
    """By rank, the rows that had to keep their bits and did not."""
    kept = {row for row, _ in relation.rows[0]}
    bad = {}
    for rank, taps in enumerate(base):
        if name not in taps or name not in derived[rank]:
            continue
        tap, now = taps[name], derived[rank][name].value
        if now.shape != tap.value.shape:
            bad[rank] = sorted(kept)
            continue
        if not now.numel() or torch.equal(now, tap.value):
            continue
        start = Placement.parse(tap.declared).first_row(topology, rank, relation.base.tokens)
        differs = (bits(now) != bits(tap.value)).reshape(len(now), -1).any(dim=1)
        moved = [start + int(row) for row in differs.nonzero() if start + int(row) in kept]
        if moved:
            bad[rank] = moved
    return bad


def _full(
    name: str, topology: Topology, taps: Taps, tokens: int
) -> dict[tuple[int, ...], torch.Tensor]:
    """The full value by ranks; nothing where it has none: that is the oracle's to say."""
    local = {rank: of_rank[name] for rank, of_rank in enumerate(taps) if name in of_rank}
    if len({tap.declared for tap in local.values()}) != 1:
        return {}
    placement = Placement.parse(next(iter(local.values())).declared)
    values = {rank: tap.value for rank, tap in local.items()}
    try:
        full = placement.full_values(topology, values, tokens)
    except PlacementError:
        return {}
    return {ranks: value for ranks, value in full.items() if value.shape[0] == tokens}


def _pairs(
    name: str,
    topology: Topology,
    relation: Relation,
    base: Taps,
    derived: tuple[int, Taps],
    pairs: Sequence[tuple[int, int]],
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """By ranks, the differences of the paired rows: [pairs, ...]."""
    j, taps = derived
    if not pairs:
        return
    old, new = (torch.tensor(side) for side in zip(*pairs, strict=True))
    before = _full(name, topology, base, relation.base.tokens)
    after = _full(name, topology, taps, relation.derived[j].tokens)
    for ranks, value in before.items():
        if ranks in after and after[ranks].shape[1:] == value.shape[1:]:
            yield ranks, (after[ranks][new] - value[old]).reshape(len(pairs), -1)


def _rerouted(
    name: str,
    topology: Topology,
    relation: Relation,
    base: Taps,
    derived: tuple[int, Taps],
    pairs: Sequence[tuple[int, int]],
) -> set[int]:
    """Rows of the base that chose other experts or blocks, and later ones of their sequences."""
    rows = set()
    for _ranks, difference in _pairs(name, topology, relation, base, derived, pairs):
        rows |= {pairs[i][0] for i in difference.any(dim=1).nonzero().flatten().tolist()}
    ends = {r: stop for start, stop in spans(relation.base) for r in range(start, stop)}
    return {later for row in rows for later in range(row, ends[row])}


def _moved(
    name: str,
    topology: Topology,
    relation: Relation,
    base: Taps,
    derived: tuple[int, Taps],
    pairs: Sequence[tuple[int, int]],
    allowed: float,
) -> tuple[dict[int, list[int]], float]:
    """By rank, the rows that moved by more than allowed, and the largest such difference."""
    bad: dict[int, list[int]] = {}
    worst = 0.0
    for ranks, difference in _pairs(name, topology, relation, base, derived, pairs):
        # NaN is more than anything.
        wrong = ~(difference.abs() <= allowed).all(dim=1)
        if wrong.any():
            rows = [pairs[i][0] for i in wrong.nonzero().flatten().tolist()]
            bad |= {rank: rows for rank in ranks}
            worst = max(worst, float(difference[wrong].abs().nan_to_num(nan=torch.inf).max()))
    return bad, worst


def _fails(
    relation: Relation, name: str, bad: Mapping[int, list[int]], size: str, names: Sequence[str]
) -> Verdict:
    rows = sorted({row for of_rank in bad.values() for row in of_rank})
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    position = names.index(name)
    before = f" after {names[position - 1]}" if position else ""
    return Verdict(
        name=_NAME,
        ok=False,
        what=f"{name} moves{' ' + size if size else ''} when {relation.change}",
        where=f"{name}, ranks {sorted(bad)}, rows {shown} of {relation.base.tokens}",
        why=f"these rows mean the same as before; what is computed{before} depends on other rows, "
        "on their number or on their place",
        kind="depends on other rows",
        at=name,
    )

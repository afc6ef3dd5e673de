"""The placement recogniser: how the ranks' local values make up the full value, if they do.

Nothing is declared or annotated: the local values and the reference say it. What fits several
placements (zeros, one row, one rank) is the expected one if it is among them, else the first of
`ORDER`. After these come, each only where nothing before it fits: values that are not finite,
multiples of a placement, values of an earlier tap or of another group, and wrong rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from properties.placement import Placement, PlacementError
from properties.recogniser_case import Case, Recognised
from properties.recogniser_parts import counted, mixed, own_addends, shards_summed, unreduced
from properties.recogniser_rows import (
    RowFault,
    complementary,
    deviation,
    dropped,
    features_swapped,
    miscounted,
    moved,
    near,
    not_finite,
    only_first,
    wrong_rows,
)


def recognise(
    local: Sequence[Tensor],
    truth: Tensor,
    bound: float,
    *,
    axis: str,
    tokens: int | None = None,
    earlier: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Tensor] | None = None,
    expected: Placement | None = None,
    rank: int | None = None,
    parts: Mapping[str, Tensor] | None = None,
    addends: Mapping[str, Sequence[Tensor]] | None = None,
    handed_on: bool = False,
) -> Recognised:
    """Say which placement the local values of one group hold, or what is wrong with them.

    Args:
        local: each rank's value, [rows, ...], in group order.
        truth: the full value, float64 [T, ...].
        bound: largest error of one value that rounding can explain. A sum over R ranks may be off
            by R times as much, unless it is expected: then the bound is the sum's.
        axis: the mesh axis of the group.
        tokens: rows of the truth that count, the first ones; all by default.
        earlier: full values of earlier taps by name, to recognise what was not written since.
        others: full values of other groups by name, [any rows, ...].
        expected: the placement that should hold; it wins where several fit, and wrong rows are
            read as its rows.
        rank: position of the rank to look at where each should have the full value; by default,
            and where that one is right, the first one that is wrong.
        parts: what the full value is a sum of, by name, float64 [T, ...], as far as it is known;
            and what may be added to it by mistake, with a name that begins with "+".
        addends: each rank's addend of a part, [T, ...] in group order, by the part's name.
        handed_on: whether the value is merely passed on here, so that another whole value in its
            place is likelier than a sum without one of its parts.

    Raises:
        PlacementError: no ranks, no token dimension, or an expected placement over another axis.
        ValueError: the bound is negative or not a number.
    """
    if not local or not truth.dim() or not all(value.dim() for value in local):
        raise PlacementError("needs a value [rows, ...] of at least one rank and of the truth")
    if expected is not None and expected.axis != axis and expected.kind != "replicate":
        raise PlacementError(f"{expected} is not over {axis}: give a placement over {axis}")
    if not bound >= 0:
        raise ValueError(f"the bound is {bound}; use 0 or a positive number")
    rows = len(truth)
    if tokens is None:
        tokens = rows
    if not 0 <= tokens <= rows:
        raise ValueError(f"{tokens} tokens of a full value of {rows} rows; use 0 to {rows}")
    if tokens < rows and all(len(value) == rows for value in local):
        local = [value[:tokens] for value in local]
    case = Case(
        local,
        truth[:tokens].double(),
        bound,
        axis=axis,
        first=expected.kind if expected else "",
        padding=rows - tokens,
    )
    case.numbers = truth.is_floating_point()
    if case.first:
        off = case.off(case.first, case.truth)
        if off <= bound:
            return case.placed(case.first, 1, off)
    past = {name: value[:tokens] for name, value in (earlier or {}).items()}
    summed = {name: part[:tokens].double() for name, part in (parts or {}).items()}
    return (
        _of_full_shape(case, rank, summed)
        or case.match()
        or own_addends(case, case.first, summed, addends or {})
        or (_elsewhere(case, past, others or {}) if handed_on and case.numbers else None)
        or _wrong(case, rank, past, others or {}, summed)
    )


def _of_full_shape(case: Case, rank: int | None, parts: Mapping[str, Tensor]) -> Recognised | None:
    """What comes before the other placements where each rank's shape is the full value's."""
    value = case.read(case.first, case.truth) if case.first in ("replicate", "shard") else None
    if value is None or case.size == 1 or not case.full_shaped:
        return None
    if case.first == "replicate":
        value = value[case.looked_at(rank)]
    # Zeros beside a right value would make a sum as well, but not one that code makes.
    if case.numbers and (found := dropped(value, case.truth, case.bound)):
        if case.first == "replicate" and complementary(case.local, case.truth, case.bound):
            return case.placed("partial", 1, 0.0)
        return case.fault(found, case.first, deviation(value, case.truth))
    return unreduced(case, parts) if case.first == "replicate" else None


def _wrong(
    case: Case,
    rank: int | None,
    earlier: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
) -> Recognised:
    """What values are that are no placement of the full value."""
    truth, bound = case.truth, case.bound
    if case.first == "replicate" and (first := only_first(case.local, truth, bound)):
        return case.fault(first, "", float("inf"))
    placement = next((k for k in case.kinds() if case.read(k, truth) is not None), "")
    value = case.read(placement, truth) if placement else None
    if value is None:
        return _wrong_shapes(case, others)
    if placement == "replicate":
        value = value[case.looked_at(rank)]
    off = deviation(value, truth)
    if bad := not_finite(value):
        return case.fault(bad, placement, off)
    # Where the truth is zero within the bound, it is every multiple of itself.
    if case.numbers and not near(truth, torch.zeros_like(truth), bound):
        for times in range(2, case.size + 1):
            # One rank may be wrong although another one is right.
            if near(value, truth * times, bound * times):
                found = case.placed(placement, times, deviation(value, truth * times))
                return replace(found, ranks=case.wrong_ranks(placement, range(len(truth))))
        for times in range(2, case.size + 1):
            if multiple := case.match(times=times):
                return multiple
    if case.numbers and (lost := dropped(value, truth, bound)):
        return case.fault(lost, placement, off)
    # What is known of this value comes before a likeness to another.
    if case.numbers and (summed := counted(case, placement, value, parts)):
        return summed
    if whole := _elsewhere(case, earlier, others):
        return whole
    if summed := mixed(case, placement, value, parts):
        return summed
    if case.first == "shard" and (summed := shards_summed(case, parts)):
        return summed
    if swapped := features_swapped(value, truth, bound, case.size):
        return case.fault(swapped, placement, off)
    if held := moved(value, truth, bound, earlier, others):
        return case.fault(held, placement, off)
    return _unknown(case, placement, value)


def _elsewhere(
    case: Case, earlier: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> Recognised | None:
    """The whole value of an earlier tap or of another group, in any placement."""
    for kind, known in (("stale", earlier), ("wrong group", others)):
        for name, full in known.items():
            if found := case.match(full.double()):
                what = f"the earlier tap {name!r}" if kind == "stale" else name
                return Recognised(
                    kind=kind,
                    axis=case.axis,
                    text=f"holds {found.text} of {what}",
                    placement=found.kind,
                    ranks=tuple(range(case.size)),
                    source=name,
                    off=found.off,
                )
    return None


def _wrong_shapes(case: Case, others: Mapping[str, Tensor]) -> Recognised:
    """What values are whose shapes fit no placement of the full value."""
    # Another group may have another number of tokens.
    if whole := _elsewhere(case, {}, others):
        return whole
    shapes = sorted({tuple(value.shape) for value in case.local})
    if all(value.shape[1:] == case.truth.shape[1:] for value in case.local):
        values = [value.double() for value in case.local]
        readings = []
        if len(shapes) == 1 and case.first == "partial":
            readings = [("partial", torch.stack(values).sum(0))]
        elif len(shapes) == 1:
            readings = [("replicate", value) for value in values]
        # More rows on one rank than the full value has are no shard of it.
        if all(len(value) < len(case.truth) for value in values):
            readings.append(("shard", torch.cat(values)))
        for placement, value in readings:
            if found := miscounted(value, case.truth, case.bound):
                return case.fault(found, placement, 0.0)
    has = f"has shape {list(shapes[0])} instead of {list(case.truth.shape)}"
    text = f"the ranks' shapes differ: {[*map(list, shapes)]}" if len(shapes) > 1 else has
    return Recognised(kind="shapes", axis=case.axis, text=text, off=float("inf"))


def _unknown(case: Case, placement: str, value: Tensor) -> Recognised:
    """Nothing known: the best guess and how far off it is."""
    wrong = wrong_rows(value, case.truth, case.bound)
    rows = len(case.truth)
    if 0 < len(wrong) < rows:
        text = f"only rows {wrong} of {rows} are wrong"
        off = deviation(value, case.truth)
        return case.fault(RowFault(kind="unknown", text=text, rows=(*wrong,)), placement, off)
    readings = [(kind, times) for times in range(1, case.size + 1) for kind in case.kinds()]
    if placement == "replicate" and len(case.wrong_ranks(placement, ())) < case.size:
        # Ranks that are right leave no doubt about what the others should be.
        readings = [(placement, 1)]
    guesses = [
        (case.off(kind, case.truth * times), times, kind)
        for kind, times in readings
        if kind != "partial" or not case.is_noise(case.truth)
    ]
    off, times, best = min(guesses, key=lambda guess: guess[:2])
    guess = case.placed(best, times, off)
    return Recognised(
        kind="unknown",
        axis=case.axis,
        text=f"no simple relation to the full value: nearest is {guess.text}, off by {off:.3g}",
        placement=best,
        times=times,
        rows=tuple(wrong),
        ranks=case.wrong_ranks(best, wrong),
        off=off,
    )

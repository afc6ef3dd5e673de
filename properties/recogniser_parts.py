"""What a wrong value is when the parts that its full value is a sum of are known.

A layer's output is a sum over shared and routed experts, the stream a sum of the residual and a
layer's output. A part that is counted too often, left out or scaled gives a value with no simple
relation to the full one, but with a simple one to the full one and that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from properties.placement import shard_rows
from properties.recogniser_case import Case, Recognised
from properties.recogniser_rows import deviation, near, origins_of, wrong_rows

FOREIGN = "+"
"""Begins the name of what does not belong into the full value, and may be there by mistake."""
FEWEST = 4
"""Elements that a fitted factor has to explain; with fewer, some factor fits anything."""


def unreduced(case: Case, parts: Mapping[str, Tensor]) -> Recognised | None:
    """Whether each rank holds one part whole, and its addend of the rest, which was not reduced."""
    if case.alike():
        return None
    for name, part in parts.items():
        if name.startswith(FOREIGN):
            continue
        total = torch.stack([*case.local]).double().sum(0) - (case.size - 1) * part
        off = deviation(total, case.truth)
        if off <= case.bound * case.size:
            return _own_addend(case, name, off)
    return None


def own_addends(
    case: Case, placement: str, parts: Mapping[str, Tensor], addends: Mapping[str, Sequence[Tensor]]
) -> Recognised | None:
    """Whether each rank's rows have that rank's own addend of a part in place of the sum.

    addends: each rank's own, [T, ...], by the part's name.
    """
    for name, own in addends.items():
        if name not in parts or len(own) != case.size:
            continue
        rest = case.truth - parts[name]
        right = [rest + addend.double() for addend in own if addend.shape == rest.shape]
        if len(right) != case.size:
            continue
        if placement == "shard":
            rows = shard_rows(len(rest), case.size)
            right = [full[i * rows : (i + 1) * rows] for i, full in enumerate(right)]
        bound = 2 * case.bound
        pairs = zip(case.local, right, strict=True)
        if all(near(value[: len(full)], full, bound) for value, full in pairs):
            return _own_addend(case, name, case.off(placement, case.truth))
    return None


def _own_addend(case: Case, part: str, off: float) -> Recognised:
    return Recognised(
        kind="unreduced",
        axis=case.axis,
        text=f"{part} and each rank's part of a sum over {case.axis}",
        placement="partial",
        source=part,
        off=off,
    )


def shards_summed(case: Case, parts: Mapping[str, Tensor]) -> Recognised | None:
    """Whether rows of different tokens were added up: each rank has the sum of all ranks' shards of
    the value, or of a part of it. Only where the shards have no padding."""
    tokens = len(case.truth)
    if case.size == 1 or not tokens or tokens % case.size:
        return None
    rows = tokens // case.size
    if any(value.shape != (rows, *case.truth.shape[1:]) for value in case.local):
        return None
    for name, part in {**parts, "": case.truth}.items():
        if name.startswith(FOREIGN):
            continue
        shards = part.reshape(case.size, rows, *part.shape[1:])
        excess = shards.sum(0) - shards
        own = case.truth.reshape(shards.shape) + excess
        if all(near(value, own[i], case.bound * case.size) for i, value in enumerate(case.local)):
            return Recognised(
                kind="shards summed",
                axis=case.axis,
                text=f"the shards of {name or 'the full value'} were added up over {case.axis}, "
                "though they are of different tokens",
                placement="shard",
                ranks=tuple(range(case.size)),
                source=name,
                off=case.off("shard", case.truth),
            )
    return None


def counted(
    case: Case, placement: str, value: Tensor, parts: Mapping[str, Tensor]
) -> Recognised | None:
    """Which part the wrong rows of a value [T, ...] have too often, not at all, or scaled.

    The factor is the least-squares fit of value = truth + (factor - 1) * part over the wrong rows;
    it counts only if it explains every element within the bound.
    """
    rows = wrong_rows(value, case.truth, case.bound)
    if not rows or value.shape != case.truth.shape:
        return None
    wrong, truth = value[rows].double(), case.truth[rows]
    for given, whole in {**parts, "": case.truth}.items():
        # What does not belong there is there no times, if all is right.
        foreign = given.startswith(FOREIGN)
        name, due = given.removeprefix(FOREIGN), 0 if foreign else 1
        part = whole[rows].double()
        if not part.numel() or part.numel() < FEWEST or near(part, part * 0, case.bound):
            continue
        factor = _factor(wrong - truth, part, case.bound)
        if factor is None or not _on_all(case, placement, rows, (factor - 1) * part, factor):
            continue
        if foreign and factor < 1:
            continue
        times = factor - 1 + due
        return Recognised(
            kind="counted" if name else "scaled",
            axis=case.axis,
            text=_words(name, times, foreign=foreign),
            placement=placement,
            times=int(times) if times == int(times) else 1,
            factor=times,
            foreign=foreign,
            rows=tuple(rows),
            ranks=case.wrong_ranks(placement, rows),
            source=name,
            off=deviation(wrong, truth + (factor - 1) * part),
        )
    return None


def mixed(
    case: Case, placement: str, value: Tensor, parts: Mapping[str, Tensor]
) -> Recognised | None:
    """Which part the wrong rows of a value [T, ...] have from other rows, if that is all."""
    rows = wrong_rows(value, case.truth, case.bound)
    if not rows or value.shape != case.truth.shape:
        return None
    for name, part in parts.items():
        if name.startswith(FOREIGN):
            continue
        # What is there in place of the row's own part.
        instead = value.double() - case.truth + part
        if origins := origins_of(instead, rows, part, case.bound):
            return Recognised(
                kind="mixed",
                axis=case.axis,
                text=f"rows {rows} have {name} of rows {origins}",
                placement=placement,
                rows=tuple(rows),
                origins=tuple(origins),
                ranks=case.wrong_ranks(placement, rows),
                source=name,
                off=deviation(value[rows], case.truth[rows]),
            )
    return None


def _on_all(case: Case, placement: str, rows: list[int], excess: Tensor, factor: float) -> bool:
    """Whether every rank that is wrong is so in this way, where each should have the full value."""
    if placement != "replicate":
        return True
    right = case.truth.clone()
    right[rows] += excess
    bound = case.bound * max(1.0, abs(factor))
    return all(near(case.local[i], right, bound) for i in case.wrong_ranks(placement, rows))


def _factor(excess: Tensor, part: Tensor, bound: float) -> float | None:
    """The factor of a part that explains a deviation from the full value; None if none does."""
    fitted = 1 + float((excess * part).sum() / (part * part).sum())
    # A whole number or one part in so many says more than what rounding made of it.
    simple = [float(round(fitted)), *([1 / round(1 / fitted)] if 0.01 < fitted < 1 else [])]
    for factor in (*simple, fitted):
        if near(excess, (factor - 1) * part, bound * max(1.0, abs(factor))):
            return factor
    return None


def _words(part: str, factor: float, *, foreign: bool) -> str:
    if not part:
        return f"is {factor:.4g} x the full value"
    if foreign:
        often = "" if factor == 1 else f" {factor:.4g} times"
        return f"has {part} added{often}"
    if factor == 0:
        return f"lacks {part}"
    if factor == int(factor):
        return f"has {part} {int(factor)} times"
    return f"has {factor:.4g} x {part}"

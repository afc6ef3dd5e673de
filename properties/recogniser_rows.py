"""Which rows of a value are wrong, and what they hold instead: the recogniser's closer look.

The cost is that of a comparison for every wrong row, so this runs only where a value is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """What is wrong with the rows of one value; the fields are those of `Recognised`."""

    kind: str
    text: str
    rows: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    source: str = ""


def deviation(value: Tensor, truth: Tensor) -> float:
    """The largest absolute deviation of values of one shape; inf where one is not a number."""
    if not value.numel():
        return 0.0
    worst = float((value.double() - truth).abs().max())
    return worst if worst == worst else float("inf")


def near(value: Tensor, truth: Tensor, bound: float) -> bool:
    """Whether no element deviates by more than the bound."""
    return deviation(value, truth) <= bound


def rows_where(mask: Tensor) -> list[int]:
    """The rows of a mask [T, ...] that have a true element."""
    return [int(row) for row in mask.flatten(1).any(-1).nonzero()] if mask.numel() else []


def wrong_rows(value: Tensor, truth: Tensor, bound: float) -> list[int]:
    """The rows that deviate by more than the bound, or are not numbers."""
    if value.dim() == 1:
        value, truth = value[:, None], truth[:, None]
    return rows_where(~((value.double() - truth).abs() <= bound))


def not_finite(value: Tensor) -> RowFault | None:
    """The rows with NaN or infinity, if there are any."""
    bad = ~torch.isfinite(value)
    if not bool(bad.any()):
        return None
    rows = rows_where(bad[:, None] if bad.dim() == 1 else bad)
    text = f"rows {rows} are not finite: uninitialised or padding rows leaked in"
    return RowFault(kind="not finite", text=text, rows=tuple(rows))


def dropped(value: Tensor, truth: Tensor, bound: float) -> RowFault | None:
    """The wrong rows, if there are any and all of them are zero."""
    rows = wrong_rows(value, truth, bound)
    if not rows or bool(value[rows].any()):
        return None
    return RowFault(kind="missing", text=f"rows {rows} are zero: they were dropped", rows=(*rows,))


def moved(
    value: Tensor,
    truth: Tensor,
    bound: float,
    earlier: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
) -> RowFault | None:
    """What the wrong rows of a value [T, ...] hold, if all of them hold something known.

    In this order: the same rows of an earlier tap; padding, with the rows after it shifted; other
    rows of the truth; rows of another group.
    """
    wrong = wrong_rows(value, truth, bound)
    if not wrong:
        return None
    for name, past in earlier.items():
        if past.shape == truth.shape and near(value[wrong], past[wrong].double(), bound):
            text = f"rows {wrong} hold the values of the earlier tap {name!r}: they are stale"
            return RowFault(kind="stale", text=text, rows=(*wrong,), source=name)
    if padding := _shifted(value, truth, bound):
        lost = len(padding)
        text = f"rows {padding} are padding inside: the last {lost} rows were pushed out"
        return RowFault(kind="padding", text=text, rows=tuple(padding))
    if origins := origins_of(value, wrong, truth, bound):
        kind = "swapped" if sorted(origins) == wrong else "duplicated"
        text = f"rows {wrong} hold the values of rows {origins}"
        return RowFault(kind=kind, text=text, rows=(*wrong,), origins=(*origins,))
    for name, other in others.items():
        if other.shape[1:] != truth.shape[1:]:
            continue
        if origins := origins_of(value, wrong, other.double(), bound):
            text = f"rows {wrong} hold the values of rows {origins} of {name}: the wrong group"
            return RowFault(
                kind="wrong group", text=text, rows=(*wrong,), origins=(*origins,), source=name
            )
    return None


def features_swapped(value: Tensor, truth: Tensor, bound: float, blocks: int) -> RowFault | None:
    """Whether the features are all there, in equal blocks that come in another order."""
    if value.dim() < 2 or value.shape != truth.shape or not value.numel():
        return None
    if blocks < 2 or value.shape[-1] % blocks:
        return None
    have, due = value.chunk(blocks, -1), truth.chunk(blocks, -1)
    order = []
    for block in have:
        alike = [i for i, right in enumerate(due) if near(block, right, bound)]
        if len(alike) != 1:
            return None
        order += alike
    if sorted(order) != [*range(blocks)]:
        return None
    text = f"its features come in blocks in the order {order}"
    rows = tuple(wrong_rows(value, truth, bound))
    return RowFault(kind="features swapped", text=text, rows=rows)


def only_first(local: Sequence[Tensor], truth: Tensor, bound: float) -> RowFault | None:
    """Whether every one of several ranks has the same first rows of the truth, and no others."""
    rows = {len(value) for value in local}
    if len(local) < 2 or len(rows) > 1:
        return None
    (have,) = rows
    if not 0 < have < len(truth) or any(v.shape[1:] != truth.shape[1:] for v in local):
        return None
    if not all(near(value, truth[:have], bound) for value in local):
        return None
    lost = [*range(have, len(truth))]
    return RowFault(kind="missing", text=f"rows {lost} are missing on every rank", rows=(*lost,))


def complementary(local: Sequence[Tensor], truth: Tensor, bound: float) -> bool:
    """Whether each row is on one rank and zero on the others, as a table that is cut over ranks
    gives them; and not as a shard that is set into zeros, which has its rows in order."""
    if len(local) < 2 or any(value.shape != truth.shape for value in local):
        return False
    held = [[row for row in range(len(truth)) if bool(value[row].any())] for value in local]
    owned = [row for rows in held for row in rows]
    if sorted(owned) != [*range(len(truth))] or sum(map(bool, held)) < 2:
        return False
    return owned != sorted(owned) and near(torch.stack([*local]).double().sum(0), truth, bound)


def miscounted(value: Tensor, truth: Tensor, bound: float) -> RowFault | None:
    """What a value with too few or too many rows lacks or has besides the truth's, in order."""
    if value.shape[1:] != truth.shape[1:] or value.shape[0] == truth.shape[0]:
        return None
    if value.shape[0] < truth.shape[0]:
        lacking = _besides(truth, value.double(), bound)
        if lacking is None:
            return None
        return RowFault(kind="missing", text=f"rows {lacking} are missing", rows=tuple(lacking))
    extra = _besides(value, truth, bound)
    if extra is None:
        return None
    if origins := origins_of(value, extra, truth, bound):
        text = f"rows {extra} repeat rows {origins}"
        return RowFault(kind="duplicated", text=text, rows=(*extra,), origins=(*origins,))
    at_end = extra[0] == truth.shape[0]
    what = "padding that was not cut off" if at_end else "padding inside"
    return RowFault(kind="padding", text=f"rows {extra} are {what}", rows=tuple(extra))


def _besides(longer: Tensor, shorter: Tensor, bound: float) -> list[int] | None:
    """The rows of the longer value to leave out so that the shorter remains, if there are such."""
    found, extra = 0, []
    for row, value in enumerate(longer):
        if found < shorter.shape[0] and near(value, shorter[found], bound):
            found += 1
        else:
            extra.append(row)
    return extra if found == shorter.shape[0] else None


def _shifted(value: Tensor, truth: Tensor, bound: float) -> list[int]:
    """Padding rows among right rows that are shifted by them; [] if that is not what it is."""
    found, extra = 0, []
    for row, one in enumerate(value):
        if near(one, truth[found], bound):
            found += 1
        else:
            extra.append(row)
    # Of the rows from the first padding row on, at least half must be the right ones, shifted;
    # otherwise two or three rows that look alike would make padding of any wrong values.
    if not extra or found - extra[0] < len(extra):
        return []
    return [] if any(_alike(value[row], truth, bound) for row in extra) else extra


def origins_of(value: Tensor, rows: list[int], truth: Tensor, bound: float) -> list[int]:
    """For each of these rows the only row of the truth it equals; [] if one has none such."""
    origins: list[int] = []
    for row in rows:
        alike = _alike(value[row], truth, bound)
        if len(alike) != 1:
            return []
        origins += alike
    return origins


def _alike(row: Tensor, truth: Tensor, bound: float) -> list[int]:
    """The rows of the truth that this row equals."""
    if not truth.numel():
        return []
    # The first column alone rules out almost all rows, at a fraction of the cost.
    column = truth.reshape(truth.shape[0], -1)[:, 0]
    likely = ((column - row.reshape(-1)[0].double()).abs() <= bound).nonzero().flatten()
    return [int(i) for i in likely if near(row, truth[i], bound)]

"""`assert_same` and `assert_conserved`: equal bits across ranks; rows neither lost nor doubled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankfold.testing.placed import _dtype, _groups
from sim import Topology

_SHOWN = 8
"""Rows that a failure lists by place."""


def assert_same(
    local: Sequence[Tensor | None],
    *,
    axis: str = "tp",
    topology: Topology | str | None = None,
    name: str = "the value",
) -> None:
    """Fail unless the ranks of each group along an axis hold the same bits.

    Ranks that compute the same from the same inputs get the same bits; where they differ, what
    relies on it (a sliced pipeline send, sampling on each rank) mixes values.

    Args:
        local: each rank's tensor, by global rank; None on ranks that have none.
        axis: the mesh axis.
        topology: the ranks' layout; by default all ranks form one group.
        name: what failures call the value.

    Raises:
        AssertionError: they differ; the message names the ranks that stand against the majority.
        ValueError: the topology or the axis means nothing, or no rank has a value.
    """
    __tracebackhide__ = True
    groups = _groups(topology, axis, len(local))
    if all(value is None for value in local):
        raise ValueError(f"{name}: no rank has a value; return it from the program")
    for group in groups:
        have = {rank: value for rank in group if (value := local[rank]) is not None}
        if have and len(have) < len(group):
            missing = sorted(set(group) - set(have))
            raise AssertionError(f"{name} is missing on ranks {missing} of {axis}{list(group)}")
        sides: dict[object, list[int]] = {}
        for rank, value in have.items():
            sides.setdefault((value.dtype, value.shape, _bits(value)), []).append(rank)
        if len(sides) > 1:
            most = max(sides.values(), key=len)
            odd = sorted(set(have) - set(most))
            if len(sides) == len(have) > 2:
                raise AssertionError(f"{name} is another one on every rank of {axis}{list(group)}")
            how = _difference(have[odd[0]], have[most[0]])
            raise AssertionError(
                f"{name} is not the same on all ranks of {axis}{list(group)}: "
                f"ranks {odd} against ranks {most}\n"
                f"  rank {odd[0]} against rank {most[0]}: {how}"
            )


def assert_conserved(
    before: Tensor | Sequence[Tensor],
    after: Tensor | Sequence[Tensor],
    *,
    copies: int = 1,
    padding: bool = False,
    name: str = "rows",
) -> None:
    """Fail unless the rows before are the rows after, in any order and bit for bit.

    For what moves tokens and computes nothing: a shard (`before` is the whole, `after` the shards
    of all ranks), a gather (the shards, and one rank's whole), a dispatch and its return.

    Args:
        before: tensors [rows, ...], one or one for each rank.
        after: likewise.
        copies: how often each row is to be found afterwards, such as K after a dispatch to K
            experts.
        padding: whether there may be rows of zeros on top.
        name: what failures call the rows.

    Raises:
        AssertionError: rows are lost, or there are more; the message says which.
        ValueError: a tensor has no rows, or `copies` is below 1.
    """
    __tracebackhide__ = True
    if copies < 1:
        raise ValueError(f"copies={copies}; use 1 or more")
    was, now = _places(before), _places(after)
    lost, more = [], []
    for row in dict.fromkeys([*was, *now]):
        due, have = copies * len(was.get(row, ())), len(now.get(row, ()))
        if have < due:
            lost.append(f"{was[row][0]} ({have} of {due})" if due > 1 else was[row][0])
        elif have > due and not (padding and not any(row[1])):
            more.append(f"{now[row][-1]} ({have} instead of {due})")
    if lost or more:
        counts = f"{sum(map(len, was.values()))} before, {sum(map(len, now.values()))} after"
        lines = [f"{name} are not conserved: {len(lost)} lost, {len(more)} too many ({counts})"]
        lines += [f"  lost: {_listed(lost)}"] if lost else []
        lines += [f"  too many: {_listed(more)}"] if more else []
        raise AssertionError("\n".join(lines))


_Row = tuple[str, bytes]
"""dtype and row shape, and the row's bits."""


def _places(tensors: Tensor | Sequence[Tensor]) -> dict[_Row, list[str]]:
    """Where each distinct row is."""
    alone = isinstance(tensors, Tensor)
    places: dict[_Row, list[str]] = {}
    for rank, tensor in enumerate([tensors] if isinstance(tensors, Tensor) else tensors):
        if not tensor.dim():
            raise ValueError("needs tensors [rows, ...]; one has no dimension")
        kind = f"{_dtype(tensor)}{list(tensor.shape[1:])}"
        for index, row in enumerate(tensor):
            place = f"row {index}" if alone else f"row {index} of rank {rank}"
            places.setdefault((kind, _bits(row)), []).append(place)
    return places


def _bits(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)


def _listed(rows: list[str]) -> str:
    shown = ", ".join(rows[:_SHOWN])
    return shown if len(rows) <= _SHOWN else f"{shown} and {len(rows) - _SHOWN} more"


def _difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{_dtype(one)}{list(one.shape)} and {_dtype(other)}{list(other.shape)}"
    if one.dim() == 0:
        return f"{one.item()} and {other.item()}"
    rows = [i for i in range(len(one)) if _bits(one[i]) != _bits(other[i])]
    worst = float((one.detach().double() - other.detach().double()).abs().max())
    said = ", ".join(map(str, rows[:_SHOWN])) + (", ..." if len(rows) > _SHOWN else "")
    return f"rows {said} of {len(one)} differ, largest difference {worst:.3g}"

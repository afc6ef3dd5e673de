"""`assert_placed`: the ranks' local values make up the true value in the way that is declared."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from properties import Placement, PlacementError, recognise
from properties.explain import explain
from properties.recogniser_case import ORDER
from reference.rounding import gamma, unit_roundoff
from sim import Topology

_FORMS = "Replicate, Partial(tp), Shard(tokens, tp) or Shard(features, tp)"
_WRITTEN = re.compile(r"(Replicate|Partial|Shard)(?:\((?:(tokens|features), *)?(\w+)\))?")
SAFETY = 4.0
"""How much further than a sum of random roundings usually goes a right value may be off, as in
`reference.bounds`."""


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """A placement as it is written in a test."""

    kind: str
    axis: str

    def __str__(self) -> str:
        if self.kind == "features":
            return f"Shard(features, {self.axis})"
        return str(Placement(self.kind, self.axis))


class _Wrong(NamedTuple):
    """What is wrong with the values of a group."""

    said: str
    ranks: tuple[int, ...] = ()
    """Positions in the group of the ranks that are wrong, where that is known."""


def assert_placed(
    local: Sequence[Tensor | None],
    truth: Tensor,
    placement: str,
    *,
    topology: Topology | str | None = None,
    name: str = "the value",
    terms: int = 1,
    bound: float | None = None,
) -> None:
    """Fail unless the ranks' local values are the truth, placed as declared.

    Args:
        local: each rank's value [rows, ...], by global rank; None on ranks that have none, such
            as those of another stage.
        truth: the full value [T, ...]; computed in float64, so that its own rounding counts for
            nothing.
        placement: "Replicate", "Partial(tp)", "Shard(tokens, tp)" or "Shard(features, tp)", over
            any axis of the topology. "Replicate" is over all axes; "Replicate(ep)" looks for the
            likely cause over ep rather than tp.
        topology: the ranks' layout; by default all ranks form one group.
        name: what failures call the value.
        terms: the length of the longest sum in it, such as the inner size of a linear layer.
        bound: largest error that rounding can explain. By default it is derived: `rounding_bound`
            for the coarsest dtype of the local values.

    Raises:
        AssertionError: they are not; the message says what they look like instead.
        ValueError: the placement, the topology or a bound means nothing, or no rank has a value.
    """
    __tracebackhide__ = True
    expected = _parse(placement)
    groups = _groups(topology, expected.axis, len(local))
    present = [value for value in local if value is not None]
    if not present:
        raise ValueError(f"{name}: no rank has a value; return it from the program")
    if bound is None:
        dtype = max((v.dtype for v in present), key=_roundoff)
        bound = rounding_bound(truth, dtype, terms=terms, ranks=len(groups[0]))
    if not bound >= 0:
        raise ValueError(f"the bound is {bound}; use 0 or a positive number")
    if 0 < _largest(truth.detach()) <= bound:
        raise ValueError(
            f"{name}: the bound {bound:.2g} is no less than the values themselves, so that "
            "anything would hold; give shorter sums (terms=), a finer dtype, or a bound="
        )
    for group in groups:
        have = {rank: value for rank in group if (value := local[rank]) is not None}
        if not have:
            continue
        if len(have) != len(group):
            raise AssertionError(
                f"{name} is on ranks {list(have)} of {expected.axis}{list(group)}, "
                "and the others have none"
            )
        wrong = _judge([*have.values()], truth, expected, bound)
        if wrong is not None:
            raise AssertionError(_message(name, have, truth, expected, bound, wrong))


def rounding_bound(truth: Tensor, dtype: torch.dtype, *, terms: int = 1, ranks: int = 1) -> float:
    """How far a right value of this dtype may be from the truth.

    SAFETY * (gamma(terms, v) * sqrt(terms) + u * sqrt(ranks + 1)) * max|truth|, with gamma of
    `reference.rounding`, u the unit roundoff of the dtype, and v that of the accumulator: the
    dtype's own, float32's for coarser ones.

    The first term is a sum on one rank. Terms of random sign sum up to about the root of their
    number times one of them, so that the sum of their sizes is about sqrt(terms) times their sum.
    The second is the storing of the ranks' parts and their sum, REDUCED of `reference.rounding`.
    Where terms cancel further than that, give `assert_placed` a bound of your own.

    Args:
        truth: the full value.
        dtype: of the local values.
        terms: the length of the longest sum on one rank; the whole sum's will do.
        ranks: how many ranks' parts are added.
    """
    if not truth.numel() or not dtype.is_floating_point:
        return 0.0
    u = _roundoff(dtype)
    relative = gamma(terms, min(u, _roundoff(torch.float32))) * math.sqrt(terms)
    relative += u * math.sqrt(ranks + 1)
    return SAFETY * relative * _largest(truth.detach().double())


def _roundoff(dtype: torch.dtype) -> float:
    return unit_roundoff(dtype) if dtype.is_floating_point else 0.0


def _parse(text: str) -> _Expected:
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no placement; use {_FORMS}")
    word, dim, axis = found.groups()
    if word == "Replicate" and not dim:
        return _Expected(kind="replicate", axis=axis or "tp")
    if word == "Partial" and axis and not dim:
        return _Expected(kind="partial", axis=axis)
    if word == "Shard" and axis and dim:
        return _Expected(kind="shard" if dim == "tokens" else "features", axis=axis)
    raise ValueError(f"{text!r} is no placement; use {_FORMS}")


def _groups(topology: Topology | str | None, axis: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    if topology is None:
        return (tuple(range(ranks)),)
    layout = Topology.parse(topology) if isinstance(topology, str) else topology
    if layout.world_size != ranks:
        raise ValueError(
            f"{layout} has {layout.world_size} ranks, and {ranks} values were given: "
            "give what World.run returned"
        )
    if axis not in layout.groups:
        raise ValueError(f"no axis {axis!r}; use {', '.join(layout.groups)}")
    return layout.groups[axis]


def _judge(local: list[Tensor], truth: Tensor, expected: _Expected, bound: float) -> _Wrong | None:
    """What is wrong with one group's values; None if nothing is."""
    truth = truth.detach().double()
    local = [value.detach() for value in local]
    if expected.kind == "features":
        same_rows = all(value.shape[:-1] == truth.shape[:-1] for value in local)
        if same_rows and sum(value.shape[-1] for value in local) == truth.shape[-1]:
            off = _largest(torch.cat([*local], -1).double() - truth)
            if off <= bound:
                return None
        found = recognise(local, truth, bound, axis=expected.axis)
        return _Wrong(f"looks like {found.text}" if found.kind in ORDER else found.text)
    placement = Placement(expected.kind, expected.axis)
    try:
        found = recognise(local, truth, bound, axis=expected.axis, expected=placement)
    except PlacementError as error:
        raise ValueError(str(error)) from None
    if found.kind == expected.kind and found.times == 1:
        return None
    digits = math.sqrt(max(_roundoff(value.dtype) for value in local)) * _largest(truth)
    near = recognise(local, truth, max(digits, bound), axis=expected.axis, expected=placement)
    if near.kind == expected.kind and near.times == 1:
        return _Wrong(
            f"off by {near.off:.3g}, so it agrees to half of the digits: rounding? Then compute "
            "the truth in float64, and give terms= (the length of its sums) or bound="
        )
    said = explain(local, truth, bound, placement, worst=next(iter(found.ranks), 0))
    return _Wrong(said, found.ranks)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _message(
    name: str,
    have: dict[int, Tensor],
    truth: Tensor,
    expected: _Expected,
    bound: float,
    wrong: _Wrong,
) -> str:
    shapes = {rank: f"{_dtype(v)}{list(v.shape)}" for rank, v in have.items()}
    alike = len(set(shapes.values())) == 1
    held = f"{next(iter(shapes.values()))} on each rank" if alike else f"by rank {shapes}"
    ranks = [*have]
    some = [ranks[i] for i in wrong.ranks] if 0 < len(wrong.ranks) < len(ranks) else []
    only = f"; wrong on rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}" if some else ""
    return (
        f"{name} is not {expected}: {wrong.said}\n"
        f"  where: {expected.axis}{ranks}, {held}{only}\n"
        f"  truth: {_dtype(truth)}{list(truth.shape)}, compared within {bound:.2g}"
    )


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")

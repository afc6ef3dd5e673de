"""What wrong values look like against the placement expected: the recogniser's finding in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from properties.placement import Placement, shard_rows
from properties.recogniser import recognise
from properties.recogniser_case import Recognised


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with a value, as a class of fault and in words."""

    kind: str
    """One of `KINDS`."""
    text: str
    """One line."""


KINDS = (
    "counted too often",
    "reduction missing",
    "gather missing",
    "not sharded",
    "part missing",
    "scaled",
    "rows lost",
    "rows duplicated",
    "rows swapped",
    "rows mixed",
    "shards summed",
    "features swapped",
    "padding leaked",
    "not finite",
    "stale",
    "wrong group",
    "wrong shape",
    "wrong heads",
    "wrong blocks",
    "wrong values",
)
"""The classes of fault that a value can show."""

# (expected, found) to the class and the likely cause. What is found where it is expected, is
# there too often.
CAUSES = {
    ("partial", "replicate"): (
        "counted too often",
        "every rank of {axis} has {full} already: the sum counts it {counted} times",
    ),
    ("shard", "replicate"): (
        "not sharded",
        "every rank of {axis} has {all}: it was never sharded, or gathered too early",
    ),
    ("replicate", "partial"): (
        "reduction missing",
        "looks like {found}: a reduction over {axis} is missing",
    ),
    ("shard", "partial"): (
        "reduction missing",
        "looks like {found} of all tokens: a reduce-scatter is missing",
    ),
    ("replicate", "shard"): ("gather missing", "looks like {found}: a gather is missing"),
    ("partial", "shard"): ("gather missing", "looks like {found}: a gather is missing"),
    ("replicate", "features"): ("gather missing", "looks like {found}: a gather is missing"),
    ("shard", "unreduced"): (
        "reduction missing",
        "is {source} with this rank's addend alone: it was sliced and not summed over {axis}",
    ),
    ("replicate", "unreduced"): (
        "reduction missing",
        "is {source} and this rank's part of the layer's output: taken before the reduction over "
        "{axis}",
    ),
}
OF_ROWS = {
    "missing": "rows lost",
    "duplicated": "rows duplicated",
    "swapped": "rows swapped",
    "mixed": "rows mixed",
    "shards summed": "shards summed",
    "features swapped": "features swapped",
    "padding": "padding leaked",
    "not finite": "not finite",
    "stale": "stale",
    "wrong group": "wrong group",
    "shapes": "wrong shape",
    "scaled": "scaled",
}
TOO_OFTEN = "is {times} x the full value: summed over {axis} once too often"
ON_EVERY_RANK = "{found}: every rank of {axis} added it before the sum"


def explain(
    local: Sequence[torch.Tensor],
    truth: torch.Tensor,
    bound: float,
    placement: Placement,
    worst: int = 0,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """`diagnose`, in words alone."""
    return diagnose(local, truth, bound, placement, worst, parts).text


def diagnose(
    local: Sequence[torch.Tensor],
    truth: torch.Tensor,
    bound: float,
    placement: Placement,
    worst: int = 0,
    parts: Mapping[str, torch.Tensor] | None = None,
    earlier: Mapping[str, torch.Tensor] | None = None,
    others: Mapping[str, torch.Tensor] | None = None,
    addends: Mapping[str, Sequence[torch.Tensor]] | None = None,
    handed_on: bool = False,
) -> Diagnosis:
    """What wrong values look like, if they look like something.

    Args:
        local: the local values of the ranks of one group, in group order.
        truth: the full value, float64 [T, ...].
        bound: largest error that rounding can explain.
        placement: the placement expected, over the group's axis.
        worst: index of the rank to look at, where the value should be replicated.
        parts: what the full value is a sum of, by name, float64 [T, ...], as far as known.
        earlier: full values of earlier taps, by name.
        others: full values of other groups, by name.
        addends: each rank's addend of a part, by the part's name.
        handed_on: whether the value is merely passed on here.
    """
    found = recognise(
        local,
        truth,
        bound,
        axis=placement.axis,
        expected=placement,
        rank=worst,
        parts=parts,
        earlier=earlier,
        others=others,
        addends=addends,
        handed_on=handed_on,
    )
    axis, ranks = placement.axis, len(local)
    if found.kind == placement.kind and found.times > 1:
        text = TOO_OFTEN.format(times=found.times, axis=axis)
        return Diagnosis(kind="counted too often", text=text)
    if cause := CAUSES.get((placement.kind, found.kind)):
        kind, text = cause
        times = f"{found.times} x " if found.times > 1 else ""
        text = text.format(
            axis=axis,
            found=found.text,
            source=found.source,
            full=f"{times}the full value" if times else "the full value",
            all=f"{times}all tokens",
            counted=found.times * ranks,
        )
        return Diagnosis(kind=kind, text=text)
    if found.kind == "counted":
        return _of_a_part(found, axis, ranks)
    if found.kind == "missing" and not found.placement:
        return Diagnosis(kind="rows lost", text=found.text)
    kind, shape = _unfit_shape(local, truth, placement)
    text = _join(shape, found) if shape else found.text
    return Diagnosis(kind=kind or OF_ROWS.get(found.kind, "wrong values"), text=text)


def _of_a_part(found: Recognised, axis: str, ranks: int) -> Diagnosis:
    """A part of the sum that is there too often, not at all, or scaled."""
    if found.factor == ranks and ranks > 1:
        text = ON_EVERY_RANK.format(found=found.text, axis=axis)
        return Diagnosis(kind="counted too often", text=text)
    if found.foreign:
        return Diagnosis(kind="counted too often", text=found.text)
    kind = "counted too often" if found.times > 1 else "part missing"
    return Diagnosis(kind=kind if found.factor in (0, found.times) else "scaled", text=found.text)


def _unfit_shape(
    local: Sequence[torch.Tensor], truth: torch.Tensor, placement: Placement
) -> tuple[str, str]:
    """In what the shapes differ from the expected placement's, as a class and in words."""
    tokens, shapes = truth.shape[0], {tuple(value.shape) for value in local}
    if len(shapes) > 1:
        return "wrong shape", f"the ranks' shapes differ: {sorted(map(list, shapes))}"
    shape, shard = tuple(local[0].shape), shard_rows(tokens, len(local))
    due = (shard if placement.kind == "shard" else tokens, *truth.shape[1:])
    if shape == due:
        return "", ""
    if placement.kind != "shard":
        if shape == (shard, *truth.shape[1:]):
            text = f"looks like Shard(tokens, {placement.axis}): a gather is missing"
            return "gather missing", text
        return "wrong shape", f"has shape {list(shape)} instead of {list(truth.shape)}"
    text = f"every rank has shape {list(shape)} where a shard of {tokens} tokens has {shard} rows"
    return "wrong shape", text


def _join(shape: str, found: Recognised) -> str:
    """A wrong shape, and what is in it besides where that is known."""
    return shape if found.kind in ("shapes", "unknown") else f"{shape}; {found.text}"

"""What wrong values look like against the placement expected: the recogniser's finding in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from properties.placement import Placement, shard_rows
from properties.recogniser import recognise
from properties.recogniser_case import Recognised
from properties.recogniser_rows import near

# (expected, found) to the likely cause. What is found where it is expected, is there too often.
CAUSES = {
    ("partial", "replicate"): "every rank of {axis} has {full} already: the sum counts it "
    "{counted} times",
    ("shard", "replicate"): "every rank of {axis} has {all}: it was never sharded, or gathered "
    "too early",
    ("replicate", "partial"): "looks like {found}: a reduction over {axis} is missing",
    ("shard", "partial"): "looks like {found} of all tokens: a reduce-scatter is missing",
    ("replicate", "shard"): "looks like {found}: a gather is missing",
    ("partial", "shard"): "looks like {found}: a gather is missing",
    ("replicate", "residual"): "is the residual and this rank's part of the layer's output: taken "
    "before the reduction over {axis}",
}
ADDED_ON_EVERY_RANK = "has the residual {times} times: every rank of {axis} added it before the sum"
TOO_OFTEN = "is {times} x the full value: summed over {axis} once too often"


def explain(
    local: Sequence[torch.Tensor],
    truth: torch.Tensor,
    bound: float,
    placement: Placement,
    worst: int = 0,
    base: torch.Tensor | None = None,
) -> str:
    """What wrong values look like, if they look like something.

    Args:
        local: the local values of the ranks of one group, in group order.
        truth: the full value, float64 [T, ...].
        bound: largest error that rounding can explain.
        placement: the placement expected, over the group's axis.
        worst: index of the rank to look at, where the value should be replicated.
        base: what the value is made of beside a layer's output, float64 [T, ...], if known.
    """
    axis = placement.axis
    found = recognise(local, truth, bound, axis=axis, expected=placement, rank=worst, base=base)
    whole = placement.kind == "replicate" and local[worst].shape == truth.shape
    if found.kind == "unknown" and base is not None and whole:
        for count in range(2, len(local) + 1):
            if near(local[worst], truth + (count - 1) * base, bound * count):
                return ADDED_ON_EVERY_RANK.format(times=count, axis=axis)
    if found.kind == placement.kind and found.times > 1:
        return TOO_OFTEN.format(times=found.times, axis=axis)
    if cause := CAUSES.get((placement.kind, found.kind)):
        times = f"{found.times} x " if found.times > 1 else ""
        return cause.format(
            axis=axis,
            found=found.text,
            full=f"{times}the full value" if times else "the full value",
            all=f"{times}all tokens",
            counted=found.times * len(local),
        )
    shape = _unfit_shape(local, truth, placement)
    return _join(shape, found) if shape else found.text


def _unfit_shape(local: Sequence[torch.Tensor], truth: torch.Tensor, placement: Placement) -> str:
    """In what the shapes differ from the expected placement's; "" if they do not."""
    tokens, shapes = truth.shape[0], {tuple(value.shape) for value in local}
    if len(shapes) > 1:
        return f"the ranks' shapes differ: {sorted(map(list, shapes))}"
    shape, shard = tuple(local[0].shape), shard_rows(tokens, len(local))
    due = (shard if placement.kind == "shard" else tokens, *truth.shape[1:])
    if shape == due:
        return ""
    if placement.kind != "shard":
        if shape == (shard, *truth.shape[1:]):
            return f"looks like Shard(tokens, {placement.axis}): a gather is missing"
        return f"has shape {list(shape)} instead of {list(truth.shape)}"
    return f"every rank has shape {list(shape)} where a shard of {tokens} tokens has {shard} rows"


def _join(shape: str, found: Recognised) -> str:
    """A wrong shape, and what is in it besides where that is known."""
    return shape if found.kind in ("shapes", "unknown") else f"{shape}; {found.text}"

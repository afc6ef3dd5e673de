"""What wrong values look like: the likely cause, from the local values of one group alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from properties.placement import Placement, shard_rows

PARTIAL = Placement("partial")


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
    shapes = {tuple(value.shape) for value in local}
    if len(shapes) > 1:
        return f"the ranks' shapes differ: {sorted(map(list, shapes))}"
    if wrong_rows := _explain_rows(local, truth, bound, placement):
        return wrong_rows
    size, axis = len(local), placement.axis
    if placement.kind == "replicate":
        value = local[worst].double()
    else:
        value = placement.combine(local, truth.shape[0])
    if not torch.isfinite(value).all():
        rows = _rows(~torch.isfinite(value))
        return f"rows {rows} are not finite: uninitialised or padding rows leaked in"
    if placement.kind == "partial" and size > 1 and all(near(v, truth, bound) for v in local):
        return f"every rank of {axis} has the full value already: the sum counts it {size} times"
    if placement.kind == "replicate" and size > 1 and not _zero_rows(value, truth, bound):
        total = PARTIAL.combine(local, truth.shape[0])
        if base is not None and near(total - (size - 1) * base, truth, bound * size):
            return (
                f"is the residual and this rank's part of the layer's output: taken before the "
                f"reduction over {axis}"
            )
        if near(total, truth, bound * size) and not near(truth, 0 * truth, bound * size):
            return f"looks like Partial({axis}): a reduction over {axis} is missing"
    for times in range(2, size + 1):
        if near(value, truth * times, bound * times):
            return f"is {times} x the full value: summed over {axis} once too often"
    return _explain_values(value, truth, bound)


def _explain_rows(
    local: Sequence[torch.Tensor], truth: torch.Tensor, bound: float, placement: Placement
) -> str:
    """What a wrong number of rows means; "" if it is right."""
    tokens, size, axis = truth.shape[0], len(local), placement.axis
    shape, shard = local[0].shape, shard_rows(truth.shape[0], len(local))
    if placement.kind != "shard":
        if shape == truth.shape:
            return ""
        if shape and shape[0] == shard != tokens:
            return f"looks like Shard(tokens, {axis}): a gather is missing"
        return f"has shape {list(shape)} instead of {list(truth.shape)}"
    if shape and shape[0] == shard:
        return ""
    if shape == truth.shape and all(near(v, truth, bound) for v in local):
        return f"every rank of {axis} has all tokens: it was never sharded, or gathered too early"
    if shape == truth.shape and near(PARTIAL.combine(local, tokens), truth, bound * size):
        return f"looks like Partial({axis}) of all tokens: a reduce-scatter is missing"
    return f"every rank has shape {list(shape)} where a shard of {tokens} tokens has {shard} rows"


def _explain_values(value: torch.Tensor, truth: torch.Tensor, bound: float) -> str:
    wrong = _rows((value - truth).abs() > bound)
    if _zero_rows(value, truth, bound):
        return f"rows {wrong} are zero: they were dropped"
    origins = [_origin(value[row], truth, bound) for row in wrong]
    if all(origin is not None for origin in origins):
        return f"rows {wrong} hold the values of rows {origins}"
    if len(wrong) < truth.shape[0]:
        return f"only rows {wrong} of {truth.shape[0]} are wrong"
    return "no simple relation to the full value"


def _zero_rows(value: torch.Tensor, truth: torch.Tensor, bound: float) -> bool:
    """Whether the rows that are wrong are all zero."""
    wrong = _rows((value - truth).abs() > bound)
    return bool(wrong) and not any(bool(value[row].any()) for row in wrong)


def _origin(row: torch.Tensor, truth: torch.Tensor, bound: float) -> int | None:
    """The only row of the truth that this row equals, if there is one."""
    matches = _rows(~((truth - row).abs() > bound))
    same = [i for i in matches if near(row, truth[i], bound)]
    return same[0] if len(same) == 1 else None


def near(value: torch.Tensor, truth: torch.Tensor, bound: float) -> bool:
    """Whether no element deviates by more than the bound."""
    return bool(((value.double() - truth).abs() <= bound).all())


def _rows(wrong: torch.Tensor) -> list[int]:
    flat = wrong.reshape(wrong.shape[0], -1).any(-1)
    return [int(row) for row in flat.nonzero().flatten()]

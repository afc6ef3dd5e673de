"""Who must agree on what: checks of the calls of all ranks of a group, in group order.

Each says what is wrong in one line, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .calls import Call, describe, dtype_name

UNEVEN = frozenset(
    {
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "all_to_all_single",
    }
)
"""Collectives whose operands may differ in shape from rank to rank."""


def disagreement(calls: Sequence[Call]) -> str | None:
    """What these calls disagree on that all ranks of a group must agree on.

    Works on part of a group, so that a run that got stuck can be explained.
    """
    first = calls[0]
    if all(_alike(first, other) for other in calls[1:]):
        return None
    for what, aspect in _ASPECTS.items():
        ranks_by_value: dict[str, list[int]] = {}
        for call in calls:
            value = aspect(call)
            if value is not None:
                ranks_by_value.setdefault(value, []).append(call.rank)
        if len(ranks_by_value) > 1:
            # The majority first: what follows is the odd one out.
            sides = sorted(ranks_by_value.items(), key=lambda side: -len(side[1]))
            return f"{what} differ: " + ", ".join(
                f"{_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
                for value, ranks in sides
            )
    return None


def _alike(a: Call, b: Call) -> bool:
    """Whether two calls agree in everything; the quick way for the usual case."""
    if a.op != b.op or a.reduction != b.reduction or a.root != b.root:
        return False
    if len(a.inputs) != 1 or len(b.inputs) != 1 or len(a.inputs[0]) != 1 or len(b.inputs[0]) != 1:
        return False
    x, y = a.inputs[0][0], b.inputs[0][0]
    return x.dtype is y.dtype and x.shape == y.shape


def _dtypes(call: Call) -> str | None:
    names = sorted({dtype_name(t.dtype) for t in call.operands()})
    return "/".join(names) or None


def _shapes(call: Call) -> str | None:
    if call.op in UNEVEN:
        return None
    shapes = [list(t.shape) for t in call.operands()]
    return str(shapes[0] if len(shapes) == 1 else shapes)


_ASPECTS: dict[str, Callable[[Call], str | None]] = {
    "operations": lambda call: call.op,
    "reduce ops": lambda call: str(call.reduction) if call.reduction else None,
    "roots": lambda call: None if call.root_rank is None else str(call.root_rank),
    "dtypes": _dtypes,
    "shapes": _shapes,
}


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def no_sizes(calls: Sequence[Call]) -> str | None:
    """Nothing beyond what `disagreement` checks."""
    return None


def output_sizes(scale: Callable[[int], float]) -> Callable[[Sequence[Call]], str | None]:
    """Output elements must be input elements times `scale(R)`."""

    def check(calls: Sequence[Call]) -> str | None:
        for call in calls:
            for [source], [out] in zip(call.inputs, call.outputs, strict=True):
                if out.numel() != source.numel() * scale(len(calls)) or out.dtype != source.dtype:
                    return (
                        f"rank {call.rank} has output {describe(out)} for input "
                        f"{describe(source)} in a group of {len(calls)}"
                    )
        return None

    return check


def exchange(calls: Sequence[Call]) -> str | None:
    """What rank i sends to rank j has the size that j expects from i."""
    for call in calls:
        for side, bucket in (("inputs", call.inputs[0]), ("outputs", call.outputs[0])):
            if len(bucket) != len(calls):
                return f"rank {call.rank} has {len(bucket)} {side} in a group of {len(calls)}"
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            if wrong := _unlike(sender, sender.inputs[0][j], receiver, receiver.outputs[0][i]):
                return wrong
    return None


def gathered(calls: Sequence[Call]) -> str | None:
    """Slot i of every receiver has the size of what rank i gives; sizes may differ by rank."""
    for receiver in calls:
        if not receiver.outputs:
            continue
        for bucket, outs in enumerate(receiver.outputs):
            if len(outs) != len(calls):
                return f"rank {receiver.rank} has {len(outs)} outputs in a group of {len(calls)}"
            for sender, out in zip(calls, outs, strict=True):
                if wrong := _unlike(sender, sender.inputs[bucket][0], receiver, out):
                    return wrong
    return None


def scattered(calls: Sequence[Call]) -> str | None:
    """Part i of every giver has the size of rank i's output; sizes may differ by rank."""
    for sender in calls:
        if not sender.inputs:
            continue
        for bucket, parts in enumerate(sender.inputs):
            if len(parts) != len(calls):
                return f"rank {sender.rank} has {len(parts)} inputs in a group of {len(calls)}"
            for receiver, part in zip(calls, parts, strict=True):
                if wrong := _unlike(sender, part, receiver, receiver.outputs[bucket][0]):
                    return wrong
    return None


def _unlike(a: Call, given: torch.Tensor, b: Call, expected: torch.Tensor) -> str | None:
    if given.numel() == expected.numel() and given.dtype == expected.dtype:
        return None
    return (
        f"sizes differ: rank {a.rank} gives {describe(given)} where "
        f"rank {b.rank} expects {describe(expected)}"
    )


def splits_match(calls: Sequence[Call]) -> str | None:
    """Rows that rank i gives to rank j are the rows that j expects from i."""
    for call in calls:
        for side, splits, tensor in (
            ("input", call.in_splits, call.inputs[0][0]),
            ("output", call.out_splits, call.outputs[0][0]),
        ):
            rows = tensor.shape[0] if tensor.dim() else 0
            if splits is None or len(splits) != len(calls) or sum(splits) != rows:
                return (
                    f"rank {call.rank} has {side} splits {list(splits or ())} for "
                    f"{describe(tensor)} in a group of {len(calls)}"
                )
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            gives, takes = (sender.in_splits or ())[j], (receiver.out_splits or ())[i]
            if gives != takes:
                return (
                    f"splits differ: rank {sender.rank} gives {gives} rows to rank "
                    f"{receiver.rank}, which expects {takes}"
                )
            if sender.inputs[0][0].shape[1:] != receiver.outputs[0][0].shape[1:]:
                a, b = sender.inputs[0][0], receiver.outputs[0][0]
                return (
                    f"row shapes differ: rank {sender.rank} gives {describe(a)} where "
                    f"rank {receiver.rank} expects {describe(b)}"
                )
    return None

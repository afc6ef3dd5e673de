"""How values differ that should be the same on all ranks, and what that says about the cause."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from properties.sanitizer import bits

Values = Sequence[Sequence[torch.Tensor]]
"""The tensors of a value, by rank."""

_SLACK = 64
_MOST = 0.125


def rounding(tensor: torch.Tensor, ranks: int) -> float:
    """How far apart two right replicas of a value may be, as a part of its largest element.

    Replicas have equal bits if every rank sums in the same order. If not (a ring of sends and
    receives), a sum over R ranks differs by up to (R - 1) eps of the sum of magnitudes (Higham,
    2002, section 4.2); 64 R eps leaves room for cancellation and for layers after the sum. Never
    more than an eighth, so that bfloat16 values are told apart at all.
    """
    return min(_SLACK * ranks * torch.finfo(tensor.dtype).eps, _MOST)


def same(one: torch.Tensor, other: torch.Tensor, ranks: int) -> bool:
    """Whether two replicas are equal: bit by bit, floats within `rounding`; NaN equals NaN."""
    if bits.equal([one], [other]):
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return False
    bound = rounding(one, ranks)
    a, b = _wide(one), _wide(other)
    scale = a.abs().nan_to_num(0.0, 0.0, 0.0).max()
    scale = torch.maximum(scale, b.abs().nan_to_num(0.0, 0.0, 0.0).max())
    close = ((a - b).abs() <= bound * scale) | (a == b) | (a.isnan() & b.isnan())
    return bool(close.all())


def all_same(values: Values, ranks: int | None = None) -> bool:
    """Whether all ranks hold the same value."""
    first, count = values[0], ranks or len(values)
    return all(
        len(value) == len(first)
        and all(same(a, b, count) for a, b in zip(first, value, strict=True))
        for value in values[1:]
    )


def relation(values: Values, ranks: Sequence[int]) -> str:
    """What the values of ranks that differ look like, in a few words; "" if like nothing known."""
    shapes = {tuple(tuple(t.shape) for t in value) for value in values}
    if len(shapes) > 1:
        listed = sorted({str([list(t.shape) for t in value]) for value in values})
        return f"the ranks' shapes differ: {' and '.join(listed)}"
    at = next(i for i in range(len(values[0])) if not all_same([[v[i]] for v in values]))
    tensors = [value[at] for value in values]
    if any(t.dtype != tensors[0].dtype for t in tensors):
        return f"the ranks' dtypes differ: {sorted({str(t.dtype) for t in tensors})}"
    if not tensors[0].is_floating_point():
        return ""
    wide = [_wide(t) for t in tensors]
    return _zeros(wide, ranks) or _multiple(wide, tensors[0], ranks) or _part(tensors, wide, ranks)


def _zeros(wide: Sequence[torch.Tensor], ranks: Sequence[int]) -> str:
    holds = [bool(t.any()) for t in wide]
    if sum(holds) == 1:
        return f"only rank {ranks[holds.index(True)]} has it, the others hold zeros"
    written = torch.stack([t != 0 for t in wide]).sum(0)
    if all(holds) and len(wide) > 1 and int(written.max()) == 1:
        return "each rank has written a part of its own, and holds zeros elsewhere"
    return ""


def _multiple(wide: Sequence[torch.Tensor], kind: torch.Tensor, ranks: Sequence[int]) -> str:
    first = wide[0].flatten()
    for rank, other in zip(ranks[1:], wide[1:], strict=True):
        norm = float(first @ first)
        factor = float(first @ other.flatten()) / norm if norm > 0 else 0.0
        if factor in (0.0, 1.0) or first.numel() < 2 or not torch.isfinite(other).all():
            continue
        near = same((first * factor).to(kind.dtype), other.flatten().to(kind.dtype), len(wide))
        if near and abs(factor - 1) > rounding(kind, len(wide)):
            return f"rank {rank} holds {factor:.4g} x what rank {ranks[0]} holds"
    return ""


def _part(
    tensors: Sequence[torch.Tensor], wide: Sequence[torch.Tensor], ranks: Sequence[int]
) -> str:
    if not wide[0].dim() or len(wide[0]) < 2:
        return ""
    size = len(tensors)
    rows = [
        i
        for i in range(len(wide[0]))
        if not all(same(tensors[0][i], other[i], size) for other in tensors[1:])
    ]
    if len(rows) == len(wide[0]):
        return ""
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"only rows {shown} of {len(wide[0])} differ"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.abs().double() if tensor.is_complex() else tensor.double()

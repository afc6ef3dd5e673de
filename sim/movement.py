"""What moves where: each collective as a function that writes the outputs of all its ranks.

`calls` are in group order. Outputs may alias inputs, so every result is computed before the
first write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .calls import Call
from .reduction import Reduction, reduce_tensors


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def all_reduce(calls: Sequence[Call]) -> None:
    """out_r = reduce over q of in_q."""
    reduction = _reduction(calls)
    for bucket, first in enumerate(calls[0].inputs):
        for i in range(len(first)):
            total = reduce_tensors([c.inputs[bucket][i] for c in calls], reduction)
            for call in calls:
                call.outputs[bucket][i].copy_(total)


def reduce(calls: Sequence[Call]) -> None:
    """out_root = reduce over q of in_q."""
    root = calls[calls[0].root or 0]
    total = reduce_tensors([c.inputs[0][0] for c in calls], _reduction(calls))
    _write(root.outputs[0][0], total)


def all_gather(calls: Sequence[Call]) -> None:
    """out_r[q] = in_q, where rank r has outputs (gather: at the root only)."""
    for bucket in range(len(calls[0].inputs)):
        sources = _copies([c.inputs[bucket][0] for c in calls])
        for call in calls:
            if call.outputs:
                for out, source in zip(call.outputs[bucket], sources, strict=True):
                    _write(out, source)


def all_gather_into_tensor(calls: Sequence[Call]) -> None:
    """out_r = in_0, in_1, ... one after the other."""
    for bucket in range(len(calls[0].inputs)):
        first = calls[0].inputs[bucket][0]
        whole = first.new_empty(len(calls), first.numel())
        for part, call in zip(whole, calls, strict=True):
            part.copy_(call.inputs[bucket][0].reshape(-1))
        for call in calls:
            _write(call.outputs[bucket][0], whole)


def reduce_scatter(calls: Sequence[Call]) -> None:
    """out_r = reduce over q of in_q[r]."""
    reduction = _reduction(calls)
    for bucket in range(len(calls[0].inputs)):
        totals = [
            reduce_tensors([c.inputs[bucket][i] for c in calls], reduction)
            for i in range(len(calls))
        ]
        for call, total in zip(calls, totals, strict=True):
            _write(call.outputs[bucket][0], total)


def reduce_scatter_tensor(calls: Sequence[Call]) -> None:
    """out_r = part r, of R equal parts of dim 0, of reduce over q of in_q."""
    reduction = _reduction(calls)
    for bucket in range(len(calls[0].inputs)):
        total = reduce_tensors([c.inputs[bucket][0] for c in calls], reduction)
        parts = total.reshape(len(calls), -1)
        for call, part in zip(calls, parts, strict=True):
            _write(call.outputs[bucket][0], part)


def broadcast(calls: Sequence[Call]) -> None:
    """out_r = in_root."""
    sources = calls[calls[0].root or 0].inputs[0]
    for i, call in enumerate(calls):
        if i != (calls[0].root or 0):
            for out, source in zip(call.outputs[0], sources, strict=True):
                _write(out, source)


def scatter(calls: Sequence[Call]) -> None:
    """out_r = in_root[r]."""
    parts = _copies(calls[calls[0].root or 0].inputs[0])
    for call, part in zip(calls, parts, strict=True):
        _write(call.outputs[0][0], part)


def all_to_all(calls: Sequence[Call]) -> None:
    """out_r[q] = in_q[r]."""
    sent = [_copies(c.inputs[0]) for c in calls]
    for j, call in enumerate(calls):
        for i, out in enumerate(call.outputs[0]):
            _write(out, sent[i][j])


def all_to_all_single(calls: Sequence[Call]) -> None:
    """rows for q of out_r = rows for r of in_q."""
    sent = [torch.split_with_sizes(c.inputs[0][0].clone(), list(c.in_splits or ())) for c in calls]
    for j, call in enumerate(calls):
        outs = torch.split_with_sizes(call.outputs[0][0], list(call.out_splits or ()))
        for i, out in enumerate(outs):
            _write(out, sent[i][j])


def barrier(calls: Sequence[Call]) -> None:
    """Nothing moves."""


def _reduction(calls: Sequence[Call]) -> Reduction:
    reduction = calls[0].reduction
    assert reduction is not None, calls[0].op
    return reduction

"""Collectives that reduce, over a real gloo group.

The sums are gloo's own, in gloo's order, wherever gloo has them. What it lacks (int16, float8,
premultiplied sums, parts of several lengths) is gathered or exchanged, and summed in rank order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..calls import Call
from ..reduction import reduce_tensors
from .carried import Carried, Gloo, as_bytes, as_is, exchange, flat, length, must

_SUMMED_BY_GLOO = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def all_reduce(gloo: Gloo, call: Call, started: Carried) -> None:
    """out_r = reduce over q of in_q."""
    for sources, outs in zip(call.inputs, call.outputs, strict=True):
        for source, out in zip(sources, outs, strict=True):
            if not _by_gloo(call, source):
                _gathered(gloo, call, source, out, started)
                continue
            options = dist.AllreduceOptions()
            options.reduceOp = _op(call)
            buffer = flat(source)
            if buffer.data_ptr() != out.data_ptr():
                buffer = buffer.clone()
                started.put(out, as_is, buffer)
            started.works.append(gloo.allreduce([buffer], options))


def reduce(gloo: Gloo, call: Call, started: Carried) -> None:
    """out_root = reduce over q of in_q."""
    [[source]], [[out]] = call.inputs, call.outputs
    if not _by_gloo(call, source):
        _gathered(gloo, call, source, out if gloo.rank() == call.root else None, started)
        return
    options: Any = dist.ReduceOptions()
    options.reduceOp, options.rootRank = _op(call), call.root
    # gloo writes into every rank's buffer; only the root's is to change.
    buffer = flat(source).clone()
    started.works.append(gloo.reduce([buffer], options))
    if gloo.rank() == call.root:
        started.put(out, as_is, buffer)


def reduce_scatter(gloo: Gloo, call: Call, started: Carried) -> None:
    """out_r = reduce over q of in_q[r]."""
    for parts, [out] in zip(call.inputs, call.outputs, strict=True):
        must(len(parts) == gloo.size(), f"{len(parts)} inputs in a group of {gloo.size()}")
        _exchanged(gloo, call, list(parts), out, started)


def reduce_scatter_tensor(gloo: Gloo, call: Call, started: Carried) -> None:
    """out_r = part r, of R equal parts of dim 0, of reduce over q of in_q."""
    for [source], [out] in zip(call.inputs, call.outputs, strict=True):
        size = gloo.size()
        must(
            source.numel() == out.numel() * size and out.dtype == source.dtype,
            f"output {list(out.shape)} for {list(source.shape)} in a group of {size}",
        )
        if not source.numel() or not _by_gloo(call, source):
            parts = list(flat(source).view(size, -1)) if source.numel() else [out] * size
            _exchanged(gloo, call, parts, out, started)
            continue
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = _op(call)
        buffer = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        # A copy: the output may be a part of the source.
        sent = flat(source).clone()
        started.works.append(gloo._reduce_scatter_base(buffer, sent, options))
        started.put(out, as_is, buffer)


def _op(call: Call) -> Any:
    assert call.reduction is not None
    return getattr(dist.ReduceOp, call.reduction.name.upper())


def _by_gloo(call: Call, tensor: torch.Tensor) -> bool:
    assert call.reduction is not None
    return call.reduction.factor is None and tensor.dtype in _SUMMED_BY_GLOO


def _gathered(
    gloo: Gloo, call: Call, source: torch.Tensor, out: torch.Tensor | None, started: Carried
) -> None:
    sent = as_bytes(source).clone()
    parts = [torch.empty_like(sent) for _ in range(gloo.size())]
    started.works.append(gloo.allgather([parts], [sent]))
    if out is not None:
        started.put(out, lambda: _sum(call, [part.view(out.dtype) for part in parts]))


def _exchanged(
    gloo: Gloo, call: Call, parts: list[torch.Tensor], out: torch.Tensor, started: Carried
) -> None:
    size = gloo.size()
    received = exchange(gloo, parts, [length(out)] * size, started)
    started.put(out, lambda: _sum(call, [received(r).view(out.dtype) for r in range(size)]))


def _sum(call: Call, parts: list[torch.Tensor]) -> torch.Tensor:
    assert call.reduction is not None
    return reduce_tensors(parts, call.reduction)

"""Carries a `Call` or a `Post` out over a real gloo group.

What only moves travels as bytes, so that every dtype, layout and shape gets through; gloo itself
takes fewer. Every gloo operation of a call is started by the call, and none by a wait: else
handles that are waited for in another order on another rank would mix operations up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..calls import Call
from ..mailbox import Post
from . import sums
from .carried import Carried, Gloo, as_bytes, as_is, exchange, length, must

_OWN_TAGS = 1 << 30
"""Tags from here on belong to gathers and scatters, which are messages here: their ranks do not
know whether all parts are of one length, which gloo's own would need."""


def carry(gloo: Gloo, call: Call) -> Carried:
    """Start a collective."""
    started = Carried()
    _CARRIERS[call.op](gloo, call, started)
    return started


def carry_post(gloo: Gloo, post: Post) -> Carried:
    """Start a send or a receive."""
    started = Carried()
    if post.op == "send":
        started.works.append(gloo.send([as_bytes(post.tensor)], post.destination, post.tag))
        return started
    buffer = started.buffer(post.tensor)
    if post.source is None:
        started.works.append(gloo.recv_anysource([buffer], post.tag))
    else:
        started.works.append(gloo.recv([buffer], post.source, post.tag))
    return started


def _broadcast(gloo: Gloo, call: Call, started: Carried) -> None:
    for source, out in zip(call.inputs[0], call.outputs[0], strict=True):
        options: Any = dist.BroadcastOptions()
        options.rootRank = call.root
        at_root = gloo.rank() == call.root
        buffer = as_bytes(source).clone() if at_root else started.buffer(out)
        started.works.append(gloo.broadcast([buffer], options))


def _all_gather(gloo: Gloo, call: Call, started: Carried) -> None:
    """Every rank knows all lengths from its outputs, so all pad to the longest."""
    for [source], outs in zip(call.inputs, call.outputs, strict=True):
        must(len(outs) == gloo.size(), f"{len(outs)} outputs in a group of {gloo.size()}")
        longest = max(map(length, outs))
        must(length(source) == length(outs[gloo.rank()]), f"input {list(source.shape)}")
        sent = torch.zeros(longest, dtype=torch.uint8, device=source.device)
        sent[: length(source)] = as_bytes(source)
        parts = [torch.zeros_like(sent) for _ in outs]
        started.works.append(gloo.allgather([parts], [sent]))
        for out, part in zip(outs, parts, strict=True):
            started.put(out, _head, part, out)


def _head(part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return part[: length(out)].view(out.dtype)


def _all_gather_into_tensor(gloo: Gloo, call: Call, started: Carried) -> None:
    for [source], [out] in zip(call.inputs, call.outputs, strict=True):
        must(
            out.numel() == source.numel() * gloo.size() and out.dtype == source.dtype,
            f"output {list(out.shape)} for {list(source.shape)} in a group of {gloo.size()}",
        )
        # A copy: the source may be a part of the output.
        sent = as_bytes(source).clone()
        started.works.append(gloo._allgather_base(started.buffer(out), sent))


def _gather(gloo: Gloo, call: Call, started: Carried) -> None:
    [source] = call.inputs[0]
    tag = _OWN_TAGS + call.sequence
    if gloo.rank() != call.root:
        started.works.append(gloo.send([as_bytes(source)], call.root, tag))
        return
    outs = call.outputs[0]
    must(len(outs) == gloo.size(), f"{len(outs)} outputs in a group of {gloo.size()}")
    for rank, out in enumerate(outs):
        if rank == call.root:
            copied = source.detach().clone()
            started.put(out, as_is, copied)
        else:
            started.works.append(gloo.recv([started.buffer(out)], rank, tag))


def _scatter(gloo: Gloo, call: Call, started: Carried) -> None:
    [out] = call.outputs[0]
    tag = _OWN_TAGS + call.sequence
    if gloo.rank() != call.root:
        started.works.append(gloo.recv([started.buffer(out)], call.root, tag))
        return
    parts = call.inputs[0]
    must(len(parts) == gloo.size(), f"{len(parts)} inputs in a group of {gloo.size()}")
    for rank, part in enumerate(parts):
        if rank == call.root:
            copied = part.detach().clone()
            started.put(out, as_is, copied)
        else:
            started.works.append(gloo.send([as_bytes(part)], rank, tag))


def _all_to_all(gloo: Gloo, call: Call, started: Carried) -> None:
    [sources], [outs] = call.inputs, call.outputs
    for side in (sources, outs):
        must(len(side) == gloo.size(), f"{len(side)} tensors in a group of {gloo.size()}")
    received = exchange(gloo, list(sources), [length(out) for out in outs], started)
    for rank, out in enumerate(outs):
        started.put(out, torch.Tensor.view, received(rank), out.dtype)


def _all_to_all_single(gloo: Gloo, call: Call, started: Carried) -> None:
    [[source]], [[out]] = call.inputs, call.outputs
    given, taken = _in_bytes(source, call.in_splits, gloo), _in_bytes(out, call.out_splits, gloo)
    sent = as_bytes(source).clone()
    into = started.buffer(out)
    started.works.append(gloo.alltoall_base(into, sent, taken, given, dist.AllToAllOptions()))


def _in_bytes(tensor: torch.Tensor, splits: tuple[int, ...] | None, gloo: Gloo) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = splits or ()
    must(len(splits) == gloo.size() and sum(splits) == rows, f"splits {splits} of {rows} rows")
    row = tensor[:1].numel() * tensor.element_size()
    return [row * count for count in splits]


def _barrier(gloo: Gloo, call: Call, started: Carried) -> None:
    started.works.append(gloo.barrier())


_CARRIERS: dict[str, Callable[[Gloo, Call, Carried], None]] = {
    "all_reduce": sums.all_reduce,
    "reduce": sums.reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": sums.reduce_scatter,
    "reduce_scatter_tensor": sums.reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}

"""Operations on tensors of a GPU, carried out on copies of them on the CPU.

For ranks that share a GPU, between which there is no NCCL. The values are those that gloo gives.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..calls import Call
from ..gloo.carried import Carried, Gloo, as_is
from ..gloo.carry import carry, carry_post
from ..mailbox import Post


def staged(gloo: Gloo, call: Call) -> Carried:
    """Start a collective; its outputs are written once it is waited for."""
    outputs = [[torch.empty(t.shape, dtype=t.dtype) for t in bucket] for bucket in call.outputs]
    inputs = [[_on_cpu(t) for t in bucket] for bucket in call.inputs]
    started = carry(gloo, replace(call, inputs=inputs, outputs=outputs))
    # After what `carry` itself writes into the copies. What is not written on this rank, such as
    # a broadcast's tensor at its root, is left out.
    for copies, real in zip(outputs, call.written(), strict=False):
        for copied, out in zip(copies, real, strict=True):
            started.put(out, as_is, copied)
    return started


def staged_post(gloo: Gloo, post: Post) -> Carried:
    """Start a send or a receive."""
    if post.op == "send":
        return carry_post(gloo, replace(post, tensor=_on_cpu(post.tensor)))
    buffer = torch.empty(post.tensor.shape, dtype=post.tensor.dtype)
    started = carry_post(gloo, replace(post, tensor=buffer))
    started.put(post.tensor, as_is, buffer)
    return started


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in one piece."""
    return tensor.detach().to("cpu", copy=True).contiguous()

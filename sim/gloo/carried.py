"""What a call has asked of gloo, and what is left to do once gloo has done it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Gloo = Any
"""torch.distributed.ProcessGroupGloo, whose stubs lack what is called here, or another backend of
c10d with the same methods; temporary tensors are on the device of the call's own."""


@dataclass
class Carried:
    """The works that gloo has started, and the outputs to write when they are done."""

    works: list[Any] = field(default_factory=list)
    outputs: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = field(default_factory=list)

    def put(self, out: torch.Tensor, make: Callable[..., torch.Tensor], *args: Any) -> None:
        """At the end `out` becomes what `make(*args)` makes, in its own shape."""
        self.outputs.append((out, functools.partial(make, *args)))

    def buffer(self, out: torch.Tensor) -> torch.Tensor:
        """Where bytes for `out` may arrive: its own memory if that is in one piece. uint8 [n]."""
        if out.is_contiguous():
            return as_bytes(out)
        packed = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        self.put(out, as_is, packed)
        return as_bytes(packed)

    def finish(self) -> None:
        """Write the outputs, in a mode in which the transport may write into all of them."""
        if not self.outputs:
            return
        inference = any(out.is_inference() for out, _ in self.outputs)
        with torch.inference_mode() if inference else torch.no_grad():
            for out, make in self.outputs:
                out.copy_(make().reshape(out.shape))
        self.outputs = []


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that will have its values by then."""
    return tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in one piece: a view where they are already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """[n], a view where the tensor is contiguous."""
    packed = whole(tensor)
    # Not `reshape`, which keeps any stride where there is one element.
    return packed.as_strided((packed.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n], a view where the tensor is contiguous."""
    return flat(tensor).view(torch.uint8)


def length(tensor: torch.Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()


def must(good: bool, said: str) -> None:
    """Raise ValueError unless the sizes are good: gloo would crash or read beyond the end."""
    if not good:
        raise ValueError(f"{said}: sizes that do not fit together")


def exchange(
    gloo: Gloo, sent: list[torch.Tensor], lengths: list[int], started: Carried
) -> Callable[[int], torch.Tensor]:
    """Start sending tensor i to rank i, and receiving so many bytes of each.

    Returns what gives the bytes of rank i, uint8, once the exchange is done.
    """
    into = torch.empty(sum(lengths), dtype=torch.uint8, device=sent[0].device)
    whole_sent = torch.cat([as_bytes(tensor) for tensor in sent])
    own = [length(tensor) for tensor in sent]
    started.works.append(gloo.alltoall_base(into, whole_sent, lengths, own, dist.AllToAllOptions()))
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return lambda rank: into[starts[rank] : starts[rank] + lengths[rank]]

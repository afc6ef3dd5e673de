"""One rank's call of a collective, as the rendezvous sees it.

Operands are nested lists: `inputs[b][i]` is tensor i of bucket b. A plain collective has one
bucket; a coalesced one has a bucket for each operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .callsite import NOWHERE, Site
from .reduction import Reduction

Buckets = list[list[torch.Tensor]]


@dataclass(slots=True)
class Call:
    """One rank's call of a collective."""

    op: str
    rank: int
    """Global rank."""
    inputs: Buckets
    outputs: Buckets
    reduction: Reduction | None = None
    root: int | None = None
    """Rank in the group."""
    root_rank: int | None = None
    """The same as a global rank, for reports."""
    in_splits: tuple[int, ...] | None = None
    out_splits: tuple[int, ...] | None = None
    """Rows of dim 0 for each rank, for all_to_all_single."""
    blocking: bool = False
    """Whether torch waits before it returns, so that the program can do nothing meanwhile."""
    site: Site = NOWHERE
    sequence: int = 0

    def operands(self) -> list[torch.Tensor]:
        """What the call is about: its inputs, or its outputs where it has none."""
        return [t for bucket in (self.inputs or self.outputs) for t in bucket]

    def written(self) -> Buckets:
        """The outputs that the operation writes on this rank."""
        at_root = self.rank == self.root_rank
        unwritten = (self.op == "broadcast" and at_root) or (self.op == "reduce" and not at_root)
        return [] if unwritten else self.outputs

    def __str__(self) -> str:
        details = [str(self.reduction)] if self.reduction else []
        if self.root_rank is not None:
            details.append(f"root {self.root_rank}")
        if self.in_splits is not None:
            details.append(f"splits {list(self.in_splits)} -> {list(self.out_splits or ())}")
        shapes = ", ".join(describe(t) for t in self.operands()[:4])
        more = ", ..." if len(self.operands()) > 4 else ""
        return f"{self.op}({', '.join(details)}) {shapes}{more}".rstrip()


_dtype_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without its module, such as `float32`."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def describe(tensor: torch.Tensor) -> str:
    """A tensor in a report: dtype and shape, such as `float32[4, 8]`."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def nbytes(buckets: Buckets) -> int:
    """Bytes of all tensors in the buckets."""
    return sum(t.numel() * t.element_size() for bucket in buckets for t in bucket)

"""Faults of the exchanges between data-parallel ranks, in vLLM's own code and the communicator.

DP ranks gather each other's tokens before the experts, and reduce-scatter their sums afterwards.
Most of these hide at DP = 1, at TP = 1, or where all DP ranks have as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from properties.faults.fault import Fault
from properties.faults.patches import Method, minimax_m3, wrapped


@dataclass(frozen=True, kw_only=True)
class DeploymentFault(Fault):
    """A fault that takes DP ranks with tokens of their own."""

    tokens: tuple[int, ...] = (3, 1, 4, 2)
    """Tokens of the DP ranks with which it shows, over and over where there are more ranks."""
    hiding_tokens: tuple[int, ...] = ()
    """Tokens with which it does not show on the topologies of `shows`; () if it always does."""


def _communicator() -> Any:
    from model.communicator import FoldedCommunicator

    return FoldedCommunicator


@contextmanager
def dispatch_does_nothing() -> Iterator[None]:
    """vLLM's base communicator: dispatch and combine hand back what they were given."""
    ours = _communicator()

    def given(own: Method) -> Method:
        return lambda self, x, weights, ids, *rest, **more: (x, weights, ids)

    def copied(own: Method) -> Method:
        return lambda self, x, output, *rest, **more: output.copy_(x)

    with wrapped(ours, "dispatch", given), wrapped(ours, "combine_into_output", copied):
        yield


@contextmanager
def idle_rank_returns() -> Iterator[None]:
    """A rank whose rows are all dummies returns before the experts."""
    from vllm.forward_context import get_forward_context

    def early(own: Method) -> Method:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            padding = get_forward_context().is_padding
            if padding is not None and bool(padding.all()):
                return torch.zeros_like(x)
            return torch.as_tensor(own(self, x))

        return forward

    with wrapped(minimax_m3().MiniMaxM3MoE, "forward", early):
        yield


@contextmanager
def way_by_own_tokens() -> Iterator[None]:
    """A rank with few tokens takes the way for equal batches, whatever the others have."""

    def chosen(own: Method) -> Method:
        def gathered(self: Any, x: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
            if sizes is None or x.shape[0] > 2:
                return torch.as_tensor(own(self, x, sizes))
            padded = torch.cat([x, x.new_zeros(max(sizes) - x.shape[0], *x.shape[1:])])
            return torch.as_tensor(own(self, padded, [max(sizes)] * len(sizes)))

        return gathered

    with wrapped(_communicator(), "_gathered", chosen):
        yield


@contextmanager
def sums_before_the_scatter() -> Iterator[None]:
    """The experts all-reduce over the ranks that the reduce-scatter then sums over again."""

    def twice(own: Method) -> Method:
        def scattered(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            total = x.clone()
            dist.all_reduce(total, group=self.device_group)
            return torch.as_tensor(own(self, total, *args, **kwargs))

        return scattered

    with wrapped(_communicator(), "reduce_scatterv", twice):
        yield


@contextmanager
def uneven_scatter_does_not_reduce() -> Iterator[None]:
    """The scatter for uneven batches takes the rank's own rows of its own addend."""

    def sliced(own: Method) -> Method:
        def scattered(
            self: Any, x: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
        ) -> torch.Tensor:
            if sizes is None or len(set(sizes)) == 1:
                return torch.as_tensor(own(self, x, dim, sizes))
            own_rows: torch.Tensor = torch.split(x, sizes)[self.rank_in_group]
            return own_rows.clone()

        return scattered

    with wrapped(_communicator(), "reduce_scatterv", sliced):
        yield


@contextmanager
def ids_one_row_off() -> Iterator[None]:
    """The experts' ids are gathered on their own, one row off from the hidden states."""

    def off(own: Method) -> Method:
        def gathered(self: Any, x: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
            whole = torch.as_tensor(own(self, x, sizes))
            return whole if x.is_floating_point() else whole.roll(1, dims=0)

        return gathered

    with wrapped(_communicator(), "_gathered", off):
        yield


@contextmanager
def gather_pads_with_garbage() -> Iterator[None]:
    """Uneven batches are padded for an equal gather with rows that nobody writes, and the pads are
    dropped by a product with 0 and 1, which does not clear what is no number."""

    def padded(own: Method) -> Method:
        def gathered(self: Any, x: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
            if sizes is None or len(set(sizes)) == 1 or not x.is_floating_point():
                return torch.as_tensor(own(self, x, sizes))
            most, count = max(sizes), len(sizes)
            mine = x.new_empty((most, *x.shape[1:]))
            mine[: x.shape[0]] = x
            whole = torch.as_tensor(own(self, mine, [most] * count))
            kept = [i for i in range(count * most) if i % most < sizes[i // most]]
            chosen = x.new_zeros((len(kept), count * most))
            chosen[torch.arange(len(kept)), kept] = 1
            return chosen @ whole

        return gathered

    with wrapped(_communicator(), "_gathered", padded):
        yield


def dp_fault(name: str, report: str, **fields: Any) -> DeploymentFault:
    """A fault of DP ranks, whose names begin alike."""
    return DeploymentFault(name=f"dep-{name}", report=report, **fields)


FAULTS: tuple[DeploymentFault, ...] = (
    dp_fault(
        "dispatch-does-nothing",
        "vLLM's base communicator",
        mechanism="dispatch and combine are those of the base communicator, which do nothing",
        apply=dispatch_does_nothing,
        shows=("dep2", "dp2tep2", "dep8"),
        hides=("tep2",),
        kinds=("part missing", "wrong values", "reduction missing"),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "idle-rank-returns",
        "vllm#43547, #44954",
        mechanism="a DP rank without tokens returns before the experts",
        apply=idle_rank_returns,
        shows=("dep2", "dp2tep2"),
        tokens=(3, 0),
        hiding_tokens=(3, 1),
        kinds=("deadlock", "mismatch"),
        at=("all_gather",),
    ),
    dp_fault(
        "way-by-own-tokens",
        "vllm-ascend#12195",
        mechanism="the kind of gather is chosen by the rank's own number of tokens",
        apply=way_by_own_tokens,
        shows=("dep2", "dp2tp2"),
        hiding_tokens=(3,),
        kinds=("deadlock", "mismatch"),
        at=("all_gather",),
    ),
    dp_fault(
        "sums-before-the-scatter",
        "sglang#23731, #23431",
        mechanism="the experts all-reduce over the ranks of the reduce-scatter that follows",
        apply=sums_before_the_scatter,
        shows=("dep2", "dp2tp2", "dep4"),
        hides=("tep2",),
        kinds=("counted too often", "double reduce", "sum of equal inputs"),
        at=("layers.1.ffn", "reduce_scatter"),
    ),
    dp_fault(
        "scatter-does-not-reduce",
        "sglang#36879",
        mechanism="the scatter of uneven batches slices without reducing",
        apply=uneven_scatter_does_not_reduce,
        shows=("dep2", "dp2tp2"),
        hiding_tokens=(3,),
        kinds=("part missing", "wrong values", "reduction missing"),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "gather-pads-with-garbage",
        "ROCm/ATOM#1229; vllm#41249",
        mechanism="uneven batches are gathered with uninitialised pads, which a product with zero "
        "is to clear",
        apply=gather_pads_with_garbage,
        shows=("dep2", "dp2tp2", "dep4"),
        hides=("tep2",),
        hiding_tokens=(3,),
        kinds=("poison",),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "ids-one-row-off",
        "ROCm/ATOM#1208",
        mechanism="ids and hidden states are gathered apart, and do not line up",
        apply=ids_one_row_off,
        shows=("dep2", "dp2tp2"),
        hides=("tep2",),
        kinds=("wrong values",),
        at=("layers.1.ffn",),
    ),
)

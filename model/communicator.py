"""The device communicator: vLLM's collectives of unequal sizes, and its all-to-all, over c10d.

vLLM's base class leaves these out: its gathers and scatters of unequal sizes raise, and its
dispatch and combine hand back what they were given, which computes experts on a rank's own tokens
only and says nothing. Here they are what vLLM's CUDA communicator makes of them: an equal exchange
is one plain collective, an unequal one a collective over lists of parts, and dispatch and combine
go to vLLM's own all-to-all manager.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive")
"""Names under which vLLM knows the manager that gathers and reduce-scatters; the others are CUDA
kernels."""


class FoldedCommunicator(DeviceCommunicatorBase):
    """One rank's collectives on one group of vLLM's."""

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        """As vLLM calls it for every group.

        Raises NotImplementedError if the group needs an all-to-all that is a CUDA kernel.
        """
        super().__init__(
            cpu_group, device, device_group, unique_name=unique_name, use_all2all=use_all2all
        )
        if not self.use_all2all:
            return
        if self.all2all_backend not in ALL2ALL_BACKENDS:
            raise NotImplementedError(
                f"all2all backend {self.all2all_backend} is a CUDA kernel; "
                f"use {ALL2ALL_BACKENDS[0]}, which moves the same tokens"
            )
        self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in memory of its own: as on CUDA the input is left as it is."""
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        return total

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """The rows of all ranks, one rank's after another's: [n_r, ...] -> [sum of n_r, ...].

        input_: this rank's rows, or a list of such tensors, each gathered by itself. sizes: n_r
        of each rank of the group; None if all have as many as this one.

        Raises ValueError if the input's rows are not those that `sizes` gives this rank, and
        NotImplementedError for another dim than 0, as vLLM's.
        """
        if dim != 0:
            raise NotImplementedError(f"all_gatherv along dim {dim}; vLLM's takes dim 0 only")
        if isinstance(input_, torch.Tensor):
            return self._gathered(input_, sizes)
        return [self._gathered(tensor, sizes) for tensor in input_]

    def _gathered(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        rows = input_.shape[0]
        sizes = self._rows(sizes, rows)
        if rows != sizes[self.rank_in_group]:
            raise ValueError(
                f"{self._where('all_gatherv')}: {rows} rows, but sizes {sizes} say "
                f"{sizes[self.rank_in_group]}; count the tokens that are gathered, and agree on "
                "the counts first"
            )
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        source = input_.contiguous()
        if _equal(sizes):
            dist.all_gather_into_tensor(output, source, group=self.device_group)
        else:
            dist.all_gather(list(output.split(sizes)), source, group=self.device_group)
        return output

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """This rank's rows of the sum over the ranks: [..., sum of n_r, ...] -> [..., n_r, ...].

        dim: which dim has the rows. sizes: n_r of each rank of the group, in rank order; None
        divides the rows evenly. The result is contiguous.

        Raises ValueError if the rows are not the sum of `sizes`, or do not divide.
        """
        dim = dim % input_.dim()
        source = input_.movedim(dim, 0).contiguous()
        rows = source.shape[0]
        if sizes is None and rows % self.world_size:
            raise ValueError(
                f"{self._where('reduce_scatterv')}: {rows} rows do not divide by "
                f"{self.world_size}; give sizes"
            )
        sizes = self._rows(sizes, rows // self.world_size)
        if rows != sum(sizes):
            raise ValueError(
                f"{self._where('reduce_scatterv')}: {rows} rows, but sizes {sizes} add up to "
                f"{sum(sizes)}; scatter with the counts that were gathered with"
            )
        output = source.new_empty((sizes[self.rank_in_group], *source.shape[1:]))
        if _equal(sizes):
            dist.reduce_scatter_tensor(output, source, group=self.device_group)
        else:
            dist.reduce_scatter(output, list(source.split(sizes)), group=self.device_group)
        return output.movedim(0, dim).contiguous()

    def dispatch_router_logits(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...] | tuple[Any, ...]:
        """All tokens of the group that dispatches, with their router logits."""
        return self._manager().dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...] | tuple[Any, ...]:
        """All tokens of the group that dispatches, with their experts and weights."""
        return self._manager().dispatch(*args, **kwargs)

    def combine(
        self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """This rank's tokens, summed over the ranks that computed experts for them."""
        return self._manager().combine(hidden_states, is_sequence_parallel)

    def allocate_combine_input(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        is_sequence_parallel: bool = False,
    ) -> torch.Tensor | None:
        """Memory that a combine would read without a copy: none, but the manager is asked."""
        return self._manager().allocate_combine_input(shape, dtype, device, is_sequence_parallel)

    def combine_into_output(
        self,
        hidden_states: torch.Tensor,
        output: torch.Tensor,
        is_sequence_parallel: bool = False,
    ) -> torch.Tensor:
        """As `combine`, into `output`."""
        return self._manager().combine_into_output(hidden_states, output, is_sequence_parallel)

    def _manager(self) -> AgRsAll2AllManager:
        if self.all2all_manager is None:
            raise RuntimeError(
                f"{self._where('dispatch or combine')}: no all-to-all here; vLLM makes one for the "
                "expert-parallel group where DP > 1"
            )
        return self.all2all_manager

    def _rows(self, sizes: Sequence[int] | None, own: int) -> list[int]:
        """Rows of each rank, `own` for each where no sizes are given."""
        rows = [own] * self.world_size if sizes is None else list(sizes)
        if len(rows) != self.world_size:
            raise ValueError(
                f"{len(rows)} sizes {rows} for group {self._group}, which has {self.world_size} "
                "ranks; these are another group's"
            )
        return rows

    def _where(self, operation: str) -> str:
        return f"{operation} on group {self._group}, rank {self.global_rank}"

    @property
    def _group(self) -> str:
        return self.unique_name.split(":")[0] or "without a name"


def _equal(sizes: Sequence[int]) -> bool:
    return all(size == sizes[0] for size in sizes)

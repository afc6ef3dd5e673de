"""The front door: a c10d process group whose ranks are the ranks of a folded world.

torch calls the methods here by name, from Python and from C++ (functional collectives). Each
turns its arguments into a `Call` or a `Post` and hands it to the fabric. Names of torch 2.11 and
2.13 both appear, since torch renamed some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .baton import thread_baton, thread_rank
from .calls import Buckets, Call
from .errors import Misuse, NotAMember
from .fabric import Fabric, Group
from .mailbox import Post
from .reduction import Reduction
from .work import FoldedWork, GroupedWork

Tensors = list[torch.Tensor]

# torch's stubs overload each method with all that C++ accepts; only the forms below are called.
_Overloaded: Any = dist.ProcessGroup


class FoldedProcessGroup(_Overloaded):  # type: ignore[misc]
    """One rank's view of a group."""

    def __init__(self, fabric: Fabric, group: Group, index: int) -> None:
        super().__init__(index, len(group.ranks))
        self.group = group
        self._fabric = fabric
        self._index = index
        self._rank = group.ranks[index]
        self._batch: list[FoldedWork] | None = None
        group.members.add(index)
        group.awaited.discard(index)

    # --- what a process group is asked about itself ---

    def getBackendName(self) -> str:
        return "folded"

    def size(self) -> int:
        return len(self.group.ranks)

    def rank(self) -> int:
        return self._index

    @property
    def group_name(self) -> str:
        return self.group.name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self.group.label

    def __repr__(self) -> str:
        return f"<folded group {self.group}, rank {self._rank}>"

    def _set_group_desc(self, desc: str) -> None:
        if desc != "undefined":
            self.group.label = desc

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.next[self._index]

    def shutdown(self) -> None:
        """This rank is done with the group."""
        self._fabric.leave(self.group, self._index)

    abort = shutdown

    # --- collectives ---

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FoldedWork:
        buckets = [list(tensors)]
        return self._start("all_reduce", buckets, buckets, opts, reduction=_reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> FoldedWork:
        buckets, reduction = [list(tensors)], _reduction(opts)
        return self._start(
            "reduce", buckets, buckets, opts, reduction=reduction, root=opts.rootRank
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> FoldedWork:
        buckets = [list(tensors)]
        return self._start("broadcast", buckets, buckets, opts, root=opts.rootRank)

    def allgather(self, outputs: Buckets, inputs: Tensors, opts: Any = None) -> FoldedWork:
        return self._start("all_gather", [[t] for t in inputs], [list(o) for o in outputs], opts)

    def allgather_coalesced(
        self, outputs: Buckets, inputs: Tensors, opts: Any = None
    ) -> FoldedWork:
        # c10d has the outputs by rank, then by tensor; elsewhere it is by tensor, then by rank.
        by_tensor = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> FoldedWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> FoldedWork:
        sources, outs = [[t] for t in inputs], [[t] for t in outputs]
        return self._start("all_gather_into_tensor", sources, outs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Buckets, opts: Any = None) -> FoldedWork:
        return self._start(
            "reduce_scatter",
            [list(parts) for parts in inputs],
            [[t] for t in outputs],
            opts,
            reduction=_reduction(opts),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> FoldedWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> FoldedWork:
        return self._start(
            "reduce_scatter_tensor",
            [[t] for t in inputs],
            [[t] for t in outputs],
            opts,
            reduction=_reduction(opts),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> FoldedWork:
        return self._start("all_to_all", [list(inputs)], [list(outputs)], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> FoldedWork:
        return self._start(
            "all_to_all_single",
            [[source]],
            [[output]],
            opts,
            in_splits=self._splits(input_splits, source),
            out_splits=self._splits(output_splits, output),
        )

    alltoall_base = all_to_all_single

    def gather(self, outputs: Buckets, inputs: Tensors, opts: Any) -> FoldedWork:
        outs = [list(o) for o in outputs] if self._index == opts.rootRank else []
        return self._start("gather", [[t] for t in inputs], outs, opts, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Buckets, opts: Any) -> FoldedWork:
        parts = [list(p) for p in inputs] if self._index == opts.rootRank else []
        return self._start("scatter", parts, [[t] for t in outputs], opts, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> FoldedWork:
        return self._start("barrier", [], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # --- point to point ---

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> FoldedWork:
        return self._post("send", tensors, self._index, destination, tag, destination)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> FoldedWork:
        return self._post("recv", tensors, source, self._index, tag, source)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> FoldedWork:
        return self._post("recv", tensors, None, self._index, tag, None)

    # --- coalescing ---

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> GroupedWork:
        works, self._batch = self._batch or [], None
        return GroupedWork(works)

    # --- inside ---

    def _start(
        self,
        op: str,
        inputs: Buckets,
        outputs: Buckets,
        opts: Any,
        *,
        reduction: Reduction | None = None,
        root: int | None = None,
        in_splits: tuple[int, ...] | None = None,
        out_splits: tuple[int, ...] | None = None,
    ) -> FoldedWork:
        call = Call(
            op=op,
            rank=self._rank,
            inputs=inputs,
            outputs=outputs,
            reduction=reduction,
            root=root,
            root_rank=None if root is None else self.group.ranks[root],
            in_splits=in_splits,
            out_splits=out_splits,
            blocking=self._batch is None and not getattr(opts, "asyncOp", True),
        )
        self._check_caller(op)
        return self._batched(self._fabric.collective(self.group, self._index, call))

    def _post(
        self,
        op: str,
        tensors: Tensors,
        source: int | None,
        destination: int,
        tag: int,
        peer: int | None,
    ) -> FoldedWork:
        self._check_caller(op)
        name = "any rank" if peer is None else f"rank {self.group.ranks[peer]}"
        post = Post(op, self._rank, source, destination, tag, tensors[0], name)
        return self._batched(self._fabric.post(self.group, post))

    def _batched(self, work: FoldedWork) -> FoldedWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _check_caller(self, op: str) -> None:
        caller = thread_rank()
        if caller == self._rank and thread_baton() is self._fabric.baton:
            return
        if caller is not None and thread_baton() is not self._fabric.baton:
            raise Misuse(
                f"rank {caller} called {op} at {self._fabric.sites.here()} on a group of another "
                "world; a world's groups end with it"
            )
        called = f"called {op} on {self.group} at {self._fabric.sites.here()}"
        if caller is None:
            self._fabric.break_run(
                Misuse(f"a thread that is no rank {called}; a rank calls from its own thread")
            )
        member = "in" if caller in self.group.ranks else "not in"
        self._fabric.fail(
            NotAMember(
                f"rank {caller} {called} through rank {self._rank}'s handle, and is {member} that "
                "group; each rank uses the handle that its own new_group gave"
            )
        )

    def _splits(self, splits: Sequence[int] | None, tensor: torch.Tensor) -> tuple[int, ...]:
        if splits:
            return tuple(splits)
        rows = tensor.shape[0] if tensor.dim() else 0
        return (rows // self.size(),) * self.size()


def _reduction(opts: Any) -> Reduction:
    return Reduction.of(dist.ReduceOp.SUM if opts is None else opts.reduceOp)


def label_group(group: dist.ProcessGroup, label: str) -> None:
    """Name a group, such as "tp", for reports and the ledger. Groups of other transports are
    left alone, so that a program may label its groups wherever it runs."""
    if isinstance(group, FoldedProcessGroup):
        group.group.label = label

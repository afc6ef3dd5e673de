"""DistributedDataParallel on folded ranks.

Its reducer waits for gradients in C++, where no other rank could run meanwhile. So each bucket is
averaged in a communication hook that waits in Python, and hands the reducer a finished future.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sim.baton import thread_rank

Hook = Callable[[Any, Any], Any]


@contextlib.contextmanager
def waiting_in_python() -> Iterator[None]:
    """Give the DistributedDataParallel of each rank such a hook, meanwhile; also a hook that the
    script registers is waited for in Python."""
    kind: Any = DistributedDataParallel
    construct, register = kind.__init__, kind.register_comm_hook

    def register_waiting(self: Any, state: object, hook: Hook) -> None:
        if thread_rank() is None:
            register(self, state, hook)
            return
        known = "_rankfold_hook" in vars(self)
        vars(self)["_rankfold_hook"] = (state, hook)
        if known:
            return

        def waiting(_: object, bucket: Any) -> Any:
            state, hook = vars(self)["_rankfold_hook"]
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            value = hook(state, bucket).wait()
            done.set_result(value[0] if isinstance(value, list) else value)
            return done

        # torch compares them with the types themselves.
        returns = torch.futures.Future[torch.Tensor]
        waiting.__annotations__.update({"bucket": GradBucket, "return": returns})
        register(self, None, waiting)

    def construct_waiting(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        if thread_rank() is not None:
            register_waiting(self, self.process_group, _average)

    kind.__init__, kind.register_comm_hook = construct_waiting, register_waiting
    try:
        yield
    finally:
        kind.__init__, kind.register_comm_hook = construct, register


def _average(group: Any, bucket: GradBucket) -> Any:
    """What the reducer does without a hook, [elements of the bucket]: the ranks' average."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    return work.get_future()

"""An output that shares memory with an input: torch's threaded group gets it wrong, we do not.

`multi_threaded_pg` is torch's own transport for ranks in one process, and what a folded world
replaces; it writes outputs while it still reads inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.sim.conformance.compare import difference, folded
from tests.sim.conformance.gloo_pool import GlooPool, Invocation
from tests.sim.conformance.operands import Array, Kind, numbers
from tests.sim.conformance.programs import reduce_scatter_tensor, reduce_scatter_tensor_aliased
from tests.sim.conformance.truths import reduce_scatter_tensor_aliased as truth

RANKS, SEED = 4, 7
KIND = Kind(values="whole")


def threaded_ranks(rank: int, world_size: int, seed: int, *, aliased: bool) -> list[torch.Tensor]:
    """What each rank of torch's threaded group gets: one tensor for each of its threads."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, results = dist.HashStore(), [torch.empty(0)] * RANKS
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def live(me: int) -> None:
        dist.init_process_group("threaded", store=store, rank=me, world_size=RANKS)
        if aliased:
            [results[me]] = reduce_scatter_tensor_aliased(
                me, RANKS, seed, kind=KIND, rows=2, op="sum"
            )
        else:
            [results[me]] = reduce_scatter_tensor(
                me, RANKS, seed, kind=KIND, shape=(2, 2), op="sum"
            )

    threads = [threading.Thread(target=live, args=(r,), daemon=True) for r in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def expected() -> list[list[Array]]:
    """The right answer, by the numpy reference; the same for both programs."""
    return truth(
        RANKS,
        SEED,
        lambda rank, shape: numbers(KIND.tensor(SEED, rank, shape)),
        rows=2,
        op="sum",
    )


@pytest.mark.gloo
def test_reduce_scatter_into_its_input(gloo: Callable[[int], GlooPool]) -> None:
    """Folded and gloo are right in place; torch's threaded group only out of place."""
    options = {"kind": KIND, "rows": 2, "op": "sum"}
    aliased = Invocation(program=reduce_scatter_tensor_aliased, seed=SEED, options=options)
    assert not difference(folded(RANKS, None, [aliased])[0], expected(), None)
    assert not difference(gloo(RANKS).run(aliased)[0], expected(), None)

    # The threaded group patches torch for good, so it lives in a process of its own.
    child = GlooPool(1)
    try:
        [apart], [in_place] = child.run(
            *(
                Invocation(program=threaded_ranks, seed=SEED, options={"aliased": aliased})
                for aliased in (False, True)
            )
        )
    finally:
        child.close()
    assert not difference([[x] for x in apart], expected(), None)
    assert difference([[x] for x in in_place], expected(), None)

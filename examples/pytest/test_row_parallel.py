"""A vLLM layer over tensor parallelism: its values, and one all-reduce for each rank.

pytest examples/pytest/test_row_parallel.py
"""

import pytest
import torch

from rankfold.testing import Worlds, assert_ledger, assert_placed, load
from sim import RankContext

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 16, generator=GENERATOR)
WEIGHT = torch.randn(8, 16, generator=GENERATOR)
TRUTH = X.double() @ WEIGHT.double().T
TOPOLOGIES = ["tp2", "tp4", "tp2pp2"]


def down_proj(ctx: RankContext, reduce_results: bool) -> torch.Tensor:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear(16, 8, bias=False, return_bias=False, reduce_results=reduce_results)
    load(layer, weight=WEIGHT)
    shards = X.chunk(ctx.topology.tp, -1)
    y: torch.Tensor = layer(shards[get_tensor_model_parallel_rank()].contiguous())
    return y


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_output_is_reduced_once(vllm_world: Worlds, topology: str) -> None:
    world = vllm_world(topology)
    y = world.run(down_proj, reduce_results=True)
    assert_placed(y, TRUTH, "Replicate", topology=topology, terms=16)
    assert_ledger(world, group="tp", all_reduce=1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_deferred_reduction_leaves_a_partial_sum(vllm_world: Worlds, topology: str) -> None:
    world = vllm_world(topology)
    y = world.run(down_proj, reduce_results=False)
    assert_placed(y, TRUTH, "Partial(tp)", topology=topology, terms=16)
    assert_ledger(world, group="tp")

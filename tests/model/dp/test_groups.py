"""`sim.Topology` has vLLM's groups where data parallelism is part of the topology."""

from __future__ import annotations

import importlib

import pytest
import torch.distributed as dist

from model import dp
from model.groups import group_labels, join_groups
from model.rank_state import RANK_LOCAL
from sim import RankContext, Topology, World

pytestmark = pytest.mark.usefixtures("vllm_ready")

WORDS = ["dp2", "dep4", "dp2tp2", "dp2tep2", "dp4tp2", "dp2tp2pp2", "dp2tep2pp2", "dep2pp2"]


@pytest.mark.parametrize("word", WORDS)
def test_ranks_of_every_group_are_vllms(word: str) -> None:
    def program(ctx: RankContext) -> tuple[dict[str, tuple[int, ...]], tuple[int, int]]:
        config = importlib.import_module("vllm.config")
        parallel = dp.parallel_config(ctx.topology, ctx.rank)
        with config.set_current_vllm_config(config.VllmConfig(parallel_config=parallel)):
            join_groups(ctx)
        ranks = {a: tuple(dist.get_process_group_ranks(g)) for a, g in group_labels().items()}
        return ranks, (parallel.data_parallel_rank, parallel.rank)

    with World(word, rank_local=RANK_LOCAL) as world:
        topology = world.topology
        for rank, (of_rank, config) in enumerate(world.run(program)):
            for axis in ("tp", "pp", "dp", "ep"):
                assert of_rank[axis] == topology.group_of(rank, axis), (rank, axis)
            within = topology.tp * topology.pp
            assert config == (topology.coordinates(rank)["dp"], rank % within)


@pytest.mark.parametrize(
    ("word", "all_to_all", "scattered"),
    [("dp2", True, False), ("dep2", True, False), ("dp2tep2", True, True), ("tep4", False, False)],
)
def test_vllm_decides_when_tokens_are_dispatched(
    word: str, all_to_all: bool, scattered: bool
) -> None:
    parallel = dp.parallel_config(Topology.parse(word), 0)
    assert (parallel.use_all2all, parallel.use_sequence_parallel_moe) == (all_to_all, scattered)

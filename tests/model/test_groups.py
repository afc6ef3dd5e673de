"""`sim.Topology` has the groups that vLLM's `initialize_model_parallel` makes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from sim import World

AXES = ("tp", "pp", "dp", "ep")


@pytest.mark.parametrize("word", ["tp2", "tp2pp2", "tep4pp2", "tp2pp4"])
def test_ranks_of_every_group_are_vllms(word: str, vllm_ready: None) -> None:
    tiny = TinyM3()
    weights = checkpoint(tiny, 0, torch.float32)

    def groups(ctx: Any) -> dict[str, tuple[int, ...]]:
        labels = Subject(ctx, tiny, weights).labels()
        return {axis: tuple(dist.get_process_group_ranks(labels[axis])) for axis in AXES}

    with World(word, rank_local=RANK_LOCAL) as world:
        for rank, of_rank in enumerate(world.run(groups)):
            for axis in AXES:
                assert of_rank[axis] == world.topology.group_of(rank, axis), (rank, axis)

"""vLLM's weight loaders put every expert where the kernel reads it, once."""

import pytest
import torch

from model.megamoe import layout, mxfp8
from sim import RankContext, World
from tests.model.megamoe.harness import (
    EXPERTS,
    HIDDEN,
    SHARDS,
    TABLE,
    WIDTH,
    build,
    matrices,
    rank,
    shards,
)

pytestmark = pytest.mark.usefixtures("mega_ready")

Loaded = tuple[dict[str, torch.Tensor], list[tuple[str, str, int]]]


def load_all(word: str, form: str) -> list[Loaded]:
    """For each rank its parameters, poisoned before, and the tensors that it says it took."""
    plain = matrices()

    def program(ctx: RankContext) -> Loaded:
        with rank(ctx) as config:
            experts = build(ctx, config, form)
            for param in experts.parameters():
                param.data.fill_(0x7F7F7F7F if param.dtype == torch.int32 else torch.nan)
            taken = [
                (name, shard, expert)
                for name, shard, expert, tensor in shards(plain, form)
                if getattr(experts, name).weight_loader(
                    getattr(experts, name), tensor, name, shard, expert, return_success=True
                )
            ]
            return {name: p.data for name, p in experts.named_parameters()}, taken

    with World(word, rank_local=TABLE) as world:
        return world.run(program)


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
@pytest.mark.parametrize("word", ["tep1", "tep2", "tep8"])
def test_every_expert_is_on_one_rank_once_and_reads_back_exactly(word: str, form: str) -> None:
    ranks = load_all(word, form)
    offered = [(name, shard, expert) for name, shard, expert, _ in shards(matrices(), form)]
    assert sorted(entry for _, taken in ranks for entry in taken) == sorted(offered)
    parts: dict[str, list[torch.Tensor]] = {shard: [] for shard in SHARDS}
    for params, _ in ranks:
        l1: layout.Weights
        l2: layout.Weights
        if form == "bf16":
            l1, l2 = params["w13_weight"], params["w2_weight"]
        else:
            l1 = (params["w13_weight"], params["w13_weight_scale"])
            l2 = (params["w2_weight"], params["w2_weight_scale"])
        gate, up = layout.gate_and_up(l1)
        for shard, values in (("w1", gate), ("w3", up), ("w2", layout.down(l2))):
            parts[shard].append(values)
    for shard, weight in matrices().items():
        wanted = weight if form == "bf16" else mxfp8.dequantise(*mxfp8.quantise(weight))
        assert torch.equal(torch.cat(parts[shard]), wanted.to(torch.float32)), shard


def test_where_single_rows_and_scales_lie() -> None:
    """The layout in numbers, as DeepGEMM's transform_weights_for_mega_moe states it."""
    ((params, _),) = load_all("tep1", "mxfp8")
    expert = EXPERTS - 1
    for shard, row in (("w1", 0), ("w1", 77), ("w3", 9), ("w3", WIDTH - 1), ("w2", 200)):
        elements, scales = mxfp8.quantise(matrices()[shard][expert])
        if shard == "w2":
            name, at = "w2", row
        else:
            name, at = "w13", row // 8 * 16 + (8 if shard == "w3" else 0) + row % 8
        stored = params[f"{name}_weight"][expert, at]
        assert torch.equal(stored.view(torch.uint8), elements[row].view(torch.uint8))
        # Within 128 rows, 32 j + i lies at 4 i + j.
        place = at // 128 * 128 + at % 32 * 4 + at % 128 // 32
        words = params[f"{name}_weight_scale"][expert, place].tolist()
        codes = scales[row].tolist()
        assert [word & 0xFFFFFFFF for word in words] == [
            sum(code << (8 * k) for k, code in enumerate(codes[i : i + 4]))
            for i in range(0, len(codes), 4)
        ]


def test_scale_strides_are_what_the_kernel_asks_for() -> None:
    ((params, _),) = load_all("tep1", "mxfp8")
    assert params["w13_weight_scale"].shape == (EXPERTS, 2 * WIDTH, HIDDEN // 128)
    assert params["w13_weight_scale"].stride() == (2 * WIDTH * HIDDEN // 128, 1, 2 * WIDTH)

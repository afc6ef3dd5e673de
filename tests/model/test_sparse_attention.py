"""The real MiniMax-M3's sparse layers, folded: every cut computes the same, and blocks do drop."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.megamoe.tiny import MegaTinyM3
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject
from model.tiny import ShapeError, TinyM3
from sim import RankContext, World

pytestmark = pytest.mark.usefixtures("vllm_ready")

TINY = TinyM3(layers="dmmm", attention="model")
BATCH = Batch.random(40, 256, seed=0, sequences=2)


@cache
def stepped(word: str, mega: bool = False, attention: str = "model") -> list[StepResult]:
    tiny = MegaTinyM3(layers="dmmm", attention=attention) if mega else TinyM3(
        layers="dmmm", attention=attention
    )  # fmt: skip
    dtype = torch.bfloat16 if mega else torch.float32
    weights = checkpoint(tiny, 0, dtype)

    def program(ctx: RankContext) -> StepResult:
        backend = "deep_gemm_mega_moe" if mega else "auto"
        return Subject(ctx, tiny, weights, dtype, moe_backend=backend).step(BATCH)

    with World(word, rank_local=RANK_LOCAL) as world:
        return world.run(program)


def logits(results: list[StepResult]) -> torch.Tensor:
    value = results[-1].logits
    assert value is not None
    return value


def chosen(results: list[StepResult], layer: int) -> torch.Tensor:
    """[T, G, K]: the heads of one rank after the other, each head once."""
    name = f"layers.{layer}.blocks_chosen"
    found = [result.taps[name].value for result in results if name in result.taps]
    repeats = max(1, len(found) * found[0].shape[1] // TINY.num_key_value_heads)
    return torch.cat(found[::repeats], dim=1)


def test_vllms_own_classes_run() -> None:
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerTritonImpl
    from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseTritonImpl
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3Attention, MiniMaxM3SparseAttention

    def program(ctx: RankContext) -> list[list[type]]:
        layers = Subject(ctx, TINY, checkpoint(TINY, 0, torch.float32)).model.model.layers
        sparse = layers[1].self_attn
        return [
            [type(layer.self_attn) for layer in layers],
            [type(sparse.impl), type(sparse.indexer.impl)],
        ]

    with World("tp1", rank_local=RANK_LOCAL) as world:
        classes, impls = world.run(program)[0]
    assert classes == [MiniMaxM3Attention] + 3 * [MiniMaxM3SparseAttention]
    assert impls == [MiniMaxM3SparseTritonImpl, MiniMaxM3IndexerTritonImpl]


@pytest.mark.parametrize("word", ["tp2", "tp4", "tp8", "tep4", "tp2pp2", "tep2pp4", "pp4"])
def test_every_cut_agrees_with_one_rank(word: str) -> None:
    """TP 8 has more ranks than KV heads: the heads and their choices are there twice."""
    assert torch.allclose(logits(stepped(word)), logits(stepped("tp1")), atol=5e-5)
    for layer in TINY.sparse_layers:
        assert torch.equal(chosen(stepped(word), layer), chosen(stepped("tp1"), layer))


@pytest.mark.parametrize("stages", ["pp2", "pp4"])
@pytest.mark.parametrize("mega", [False, True])
def test_stages_do_not_change_a_bit(stages: str, mega: bool) -> None:
    """At TP 2; with MegaMoE the stream is sharded by token."""
    one, more = stepped("tep2", mega), stepped(f"tep2{stages}", mega)
    assert torch.equal(logits(one), logits(more))


def test_blocks_are_dropped_and_it_matters() -> None:
    """A query of 20 tokens in blocks of 4 has up to 5 blocks and attends to 3."""
    positions = BATCH.positions
    for layer in TINY.sparse_layers:
        blocks = chosen(stepped("tp1"), layer)
        begun = positions // TINY.sparse_block_size + 1
        assert torch.equal((blocks >= 0).sum(-1), begun.clamp(max=3)[:, None].expand(-1, 4))
        # The first block and the query's own are always among them.
        assert (blocks[..., 0] == 0).all()
        assert (blocks.amax(-1) == (begun - 1)[:, None]).all()
        free = blocks[positions >= 12, :, 1]
        assert len(free.unique()) > 1
        assert (free != free[:, :1]).any()  # heads choose for themselves
    dense = logits(stepped("tp1", attention="dense"))
    sparse = logits(stepped("tp1"))
    short = positions < 12  # three blocks: all of them
    assert not torch.allclose(dense[~short], sparse[~short], atol=1e-2)


def test_the_first_block_of_layers_without_a_choice_is_dense_attention() -> None:
    """With as many blocks to choose as there are, a sparse layer is a dense one."""
    wide = TinyM3(layers="dm", attention="sparse", sparse_topk_blocks=5)
    plain = TinyM3(layers="dm")

    def of(tiny: TinyM3) -> torch.Tensor:
        weights = checkpoint(wide, 0, torch.float32)

        def program(ctx: RankContext) -> StepResult:
            names = set(checkpoint(tiny, 0, torch.float32))
            mine = {name: value for name, value in weights.items() if name in names}
            return Subject(ctx, tiny, mine).step(BATCH)

        with World("tp2", rank_local=RANK_LOCAL) as world:
            return logits(world.run(program))

    assert torch.allclose(of(wide), of(plain), atol=5e-5)


@pytest.mark.parametrize(
    ("attention", "layers", "sparse"),
    [
        ("dense", "dmm", ()),
        ("model", "dmm", (1, 2)),
        ("sparse", "dmm", (0, 1, 2)),
        ("model", "m", (0,)),
    ],
)
def test_which_layers_are_sparse(attention: str, layers: str, sparse: tuple[int, ...]) -> None:
    tiny = TinyM3(layers=layers, attention=attention)
    assert tiny.sparse_layers == sparse
    told = tiny.text_config()["sparse_attention_config"]
    assert told["sparse_attention_freq"] == [int(i in sparse) for i in range(len(layers))]
    assert told["use_sparse_attention"] is bool(sparse)
    indexers = {n for n in checkpoint(tiny, 0, torch.float32) if "index_q_proj" in n}
    assert indexers == {f"model.layers.{i}.self_attn.index_q_proj.weight" for i in sparse}


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ShapeError, match="attention 'all': use dense, sparse, model"):
        TinyM3(attention="all")
    with pytest.raises(ShapeError, match="1 first and 1 last blocks are more than the 1"):
        TinyM3(sparse_topk_blocks=1)

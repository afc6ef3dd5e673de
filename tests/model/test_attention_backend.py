"""The attention backend as vLLM sees it: no cache, and no answer without metadata."""

from types import SimpleNamespace

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from sim import RankContext, World

pytestmark = pytest.mark.usefixtures("vllm_ready")


def test_vllm_runs_its_own_layer_around_ours() -> None:
    from vllm.model_executor.layers.attention import Attention

    from model.attention_backend import FoldedAttentionBackend, FoldedAttentionImpl

    tiny = TinyM3(layers="d")

    def program(ctx: RankContext) -> tuple[type, type, type, torch.Size]:
        layer = Subject(ctx, tiny, checkpoint(tiny, 0, torch.float32)).model.model.layers[0]
        attn = layer.self_attn.attn
        return type(attn), attn.attn_backend, type(attn.impl), attn.kv_cache.shape[1:]

    with World("tp1", rank_local=RANK_LOCAL) as world:
        kinds = (Attention, FoldedAttentionBackend, FoldedAttentionImpl)
        assert world.run(program) == [(*kinds, (4, 4, 32))]  # heads, block, keys and values
    # vLLM calls `do_kv_cache_update` of its own accord then.
    assert not FoldedAttentionBackend.forward_includes_kv_cache_update


def test_missing_metadata_is_an_error_not_zeros() -> None:
    from vllm.forward_context import set_forward_context

    tiny = TinyM3(layers="d")
    batch = Batch.random(2, tiny.vocab_size, seed=0)

    def program(ctx: RankContext) -> str:
        subject = Subject(ctx, tiny, checkpoint(tiny, 0, torch.float32))
        with (
            set_forward_context(None, subject._config, num_tokens=2),
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"layers\.0.*metadata is NoneType"),
        ):
            subject.model(batch.token_ids, batch.positions)
        return "raised"

    with World("tp1", rank_local=RANK_LOCAL) as world:
        assert world.run(program) == ["raised"]


def test_what_it_does_not_compute_is_refused() -> None:
    from model.attention_backend import FoldedAttentionImpl

    for name, value in [
        ("alibi_slopes", [1.0]),
        ("sliding_window", 4),
        ("logits_soft_cap", 30.0),
        ("kv_sharing_target_layer_name", "layers.0"),
        ("attn_type", "encoder"),
    ]:
        with pytest.raises(NotImplementedError, match=f"has no {name}"):
            FoldedAttentionImpl(2, 8, 1.0, **{name: value})


def test_the_builder_takes_what_the_runner_knows() -> None:
    from model.attention_backend import PagedSequences, PagedSequencesBuilder

    builder = PagedSequencesBuilder(None, [], None, torch.device("cpu"))
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 3, 5]),
        seq_lens=torch.tensor([3, 7]),
        block_table_tensor=table,
    )
    assert builder.build(0, common) == PagedSequences(
        query_lens=(3, 2), seq_lens=(3, 7), block_table=table
    )

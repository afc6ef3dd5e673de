"""The predictor of one more token: vLLM's own module, folded, against the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import reference
from model.batch import Batch
from model.checkpoint import checkpoint
from model.draft import Draft, draft_checkpoint, one_layer
from model.rank_state import RANK_LOCAL
from model.taps import Captured
from model.tiny import ShapeError, TinyM3
from properties import Placement
from sim import RankContext, RankFailed, Topology, World

pytestmark = pytest.mark.usefixtures("vllm_ready")

TINY = TinyM3()
WEIGHTS = draft_checkpoint(TINY, checkpoint(one_layer(TINY), 0, torch.float32))
BATCH = Batch.random(40, TINY.vocab_size, seed=1, sequences=2)
HIDDEN = torch.randn(40, TINY.hidden_size, generator=torch.Generator().manual_seed(2))


@cache
def drafted(word: str) -> list[dict[str, Captured]]:
    def program(ctx: RankContext) -> dict[str, Captured]:
        return Draft(ctx, TINY, WEIGHTS).step(BATCH, HIDDEN.clone())

    with World(word, rank_local=RANK_LOCAL) as world:
        return world.run(program)


def full(word: str, name: str) -> list[torch.Tensor]:
    """The full value of a tap, by every set of ranks that has it."""
    local = {rank: taps[name] for rank, taps in enumerate(drafted(word))}
    placement = Placement.parse(local[0].declared)
    values = {rank: tap.value for rank, tap in local.items()}
    return [*placement.full_values(Topology.parse(word), values, BATCH.tokens).values()]


def bounds(word: str) -> reference.Bounds:
    config = reference.M3Config.from_hf(one_layer(TINY).text_config())
    names = reference.draft_shapes(config)
    weights = {name.removeprefix("model."): value for name, value in WEIGHTS.items()}
    return reference.draft_bounds(
        config,
        {name: value for name, value in weights.items() if name in names},
        reference.Batch(
            token_ids=BATCH.token_ids, positions=BATCH.positions, seq_lens=BATCH.seq_lens
        ),
        HIDDEN,
        dtype=torch.float32,
        ranks=Topology.parse(word).tp,
        routing=full(word, "mtp.experts_chosen")[0].long(),
        selection=full(word, "mtp.blocks_chosen")[0].long(),
    )


@pytest.mark.parametrize("word", ["tp1", "tp2", "tep4", "tp8"])
def test_every_tap_is_within_the_bound_of_the_reference(word: str) -> None:
    truth = bounds(word)
    assert truth.result.routing_rejected == ()
    assert truth.result.selection_rejected == ()
    assert set(drafted(word)[0]) == set(truth.result.taps)
    for name, expected in truth.result.taps.items():
        for value in full(word, name):
            off = float((value - expected.double()).abs().max())
            assert off <= truth.taps[name], name


def test_its_attention_is_sparse_and_its_output_is_summed() -> None:
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

    def program(ctx: RankContext) -> tuple[type, bool]:
        layer = Draft(ctx, TINY, WEIGHTS).model.model.layers["0"].transformer_layer
        return type(layer.self_attn), layer.ffn_all_reduce_deferred

    with World("tp2", rank_local=RANK_LOCAL) as world:
        assert world.run(program) == 2 * [(MiniMaxM3SparseAttention, False)]
    assert int((full("tp2", "mtp.blocks_chosen")[0] >= 0).sum(-1).max()) == 3
    assert int(BATCH.positions.max()) // TINY.sparse_block_size + 1 > 3


def test_the_first_token_of_a_sequence_has_no_embedding_there() -> None:
    """Whatever token is at position 0, the prediction is the same."""

    def program(ctx: RankContext) -> list[torch.Tensor]:
        draft = Draft(ctx, TINY, WEIGHTS)
        other = BATCH.token_ids.clone()
        other[0] = (other[0] + 1) % TINY.vocab_size
        changed = replace(BATCH, token_ids=other)
        return [draft.step(b, HIDDEN.clone())["mtp.logits"].value for b in (BATCH, changed)]

    with World("tp1", rank_local=RANK_LOCAL) as world:
        first, second = world.run(program)[0]
    assert torch.equal(first, second)


def test_decoding_goes_on_where_the_prompt_ended() -> None:
    def program(ctx: RankContext) -> list[torch.Tensor]:
        draft = Draft(ctx, TINY, WEIGHTS)
        whole = Batch.of(BATCH.token_ids[:20], (20,))
        start = Batch.of(BATCH.token_ids[:19], (19,))
        last = Batch.of(BATCH.token_ids[19:20], (1,), (19,), (0,))
        at_once = draft.step(whole, HIDDEN[:20].clone())
        draft.step(start, HIDDEN[:19].clone())
        decoded = draft.step(last, HIDDEN[19:20].clone())
        return [at_once["mtp.logits"].value[19:], decoded["mtp.logits"].value]

    with World("tp2", rank_local=RANK_LOCAL) as world:
        at_once, decoded = world.run(program)[0]
    assert torch.allclose(at_once, decoded, atol=2e-5)


def test_stages_are_refused() -> None:
    with (
        World("tp2pp2", rank_local=RANK_LOCAL) as world,
        pytest.raises(RankFailed, match="the predictor runs on one stage") as caught,
    ):
        world.run(lambda ctx: Draft(ctx, TINY, WEIGHTS) and None)
    assert isinstance(caught.value.__cause__, ShapeError)

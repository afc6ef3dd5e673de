"""The overlay computes MiniMax-M3: against float64, over stages, and with the stream whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import reference
from tests.model.overlay.drive import Arm, Step

TOKENS = [0, 1, 2, 3, 5, 8, 33]
PATTERNS = ["dmmm", "mmmm", "dddm", "mmmd"]

Rows = tuple[tuple[int, ...], ...]


def bounds(arm: Arm, step: Step) -> reference.Bounds:
    """The float64 reference of `arm`, following the experts that the subject chose."""
    chosen = []
    for layer in arm.tiny.moe_layers:
        rows = [rank.chosen[layer] for rank in step.ranks if layer in rank.chosen]
        # Shards in the order of the ranks; where tokens are whole, the first rank's are enough.
        ids = torch.cat(rows)[: arm.tokens]
        chosen.append((layer, tuple(map(tuple, ids.tolist()))))
    return _bounds(arm.layers, arm.tokens, len(step.ranks), tuple(chosen))


@cache
def _bounds(
    layers: str, tokens: int, ranks: int, chosen: tuple[tuple[int, Rows], ...]
) -> reference.Bounds:
    arm = Arm(word="tp1", layers=layers, tokens=tokens)
    config = reference.M3Config.from_hf(arm.tiny.text_config())
    plain = {name.removeprefix("model."): weight for name, weight in arm.weights.items()}
    batch = arm.batch
    return reference.bounds(
        config,
        reference.as_float64(config, plain),
        reference.Batch(
            token_ids=batch.token_ids, positions=batch.positions, seq_lens=batch.seq_lens
        ),
        dtype=arm.dtype,
        ranks=ranks,
        routing={layer: torch.tensor(ids).view(tokens, -1) for layer, ids in chosen},
    )


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("word", ["tep1", "tep2", "tep4", "tep2pp2", "tep4pp2", "tep2pp4", "tep8"])
def test_every_cut_is_within_the_bound_of_the_reference(stepped, word: str, sp: bool) -> None:
    arm = Arm(word=word, sp=sp)
    step = stepped(arm)
    bound = bounds(arm, step)
    error = (step.logprobs.double() - bound.result.taps["logprobs"]).abs().max()
    assert bound.result.routing_rejected == ()
    assert 0 < error <= bound.taps["logprobs"]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("word", ["tep4", "tep4pp2"])
def test_every_number_of_tokens(stepped, word: str, tokens: int) -> None:
    arm = Arm(word=word, tokens=tokens)
    step = stepped(arm)
    assert step.logprobs.shape == (tokens, arm.tiny.vocab_size)
    if tokens:
        bound = bounds(arm, step)
        error = (step.logprobs.double() - bound.result.taps["logprobs"]).abs().max()
        assert error <= bound.taps["logprobs"]


@pytest.mark.parametrize("layers", PATTERNS)
@pytest.mark.parametrize("word", ["tep2pp2", "tep2pp4", "tep4pp2"])
def test_stages_change_nothing_at_all(stepped, word: str, layers: str) -> None:
    for tokens in (3, 8):
        arm = Arm(word=word, layers=layers, tokens=tokens)
        one_stage = arm.but(word=word.split("pp")[0])
        assert torch.equal(stepped(arm).logprobs, stepped(one_stage).logprobs)


@pytest.mark.parametrize("tokens", TOKENS)
def test_stages_change_nothing_at_any_number_of_tokens(stepped, tokens: int) -> None:
    one, two, four = (
        stepped(Arm(word=word, tokens=tokens)).logprobs for word in ("tep2", "tep2pp2", "tep2pp4")
    )
    assert torch.equal(one, two) and torch.equal(one, four)


@pytest.mark.parametrize("word", ["tep2", "tep4", "tep2pp2", "tep8"])
@pytest.mark.parametrize("layers", PATTERNS)
def test_a_whole_stream_gives_the_same(stepped, word: str, layers: str) -> None:
    # Each row is computed alike and each sum runs in rank order, so not even a rounding differs.
    for tokens in (3, 8):
        arm = Arm(word=word, layers=layers, tokens=tokens)
        assert torch.equal(stepped(arm).logprobs, stepped(arm.but(sp=False)).logprobs)


def test_mxfp8_experts_likewise(stepped) -> None:
    arm = Arm(word="tep2pp2", tokens=5, expert_dtype="mxfp8")
    logprobs = stepped(arm).logprobs
    assert torch.equal(logprobs, stepped(arm.but(word="tep2")).logprobs)
    assert torch.equal(logprobs, stepped(arm.but(sp=False)).logprobs)
    assert not torch.equal(logprobs, stepped(arm.but(expert_dtype="bf16")).logprobs)


def test_sequence_parallelism_is_on_where_it_should_be(stepped) -> None:
    def on(arm: Arm) -> set[bool]:
        return {rank.sequence_parallel for rank in stepped(arm).ranks}

    for word in ("tep2", "tep2pp2", "tep2pp4", "tep4pp2", "tep8"):
        assert on(Arm(word=word)) == {True}
        assert on(Arm(word=word, sp=False)) == {False}
    assert on(Arm(word="tep1")) == {False}

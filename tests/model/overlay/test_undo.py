"""Undoing any single piece of the change is seen, and where."""

from __future__ import annotations

import pytest
import torch

from properties.faults import overlay as undo
from sim import RankFailed
from tests.model.overlay.drive import Arm, Step, run

ARM = Arm(word="tep2pp2", layers="dmdm", tokens=5, aux=(1, 3))


def shards(step: Step, name: str) -> torch.Tensor:
    return torch.cat([rank.seen[name] for rank in step.ranks if name in rank.seen])[: ARM.tokens]


def test_s1_1_without_it_the_stream_is_whole(mega_ready: None) -> None:
    with undo.sequence_parallel_at_one_stage_only():
        two, one = run(ARM), run(ARM.but(word="tep2"))
    assert not two.ranks[0].sequence_parallel
    assert two.ranks[0].seen["layers.0.ffn"].shape[0] == ARM.tokens
    assert one.ranks[0].sequence_parallel


def test_s1_2_without_it_a_stage_adds_rows_of_other_tokens(stepped) -> None:
    with undo.residual_of_the_first_rows():
        step = run(ARM)
    right, wrong = shards(stepped(ARM), "layers.2.residual"), shards(step, "layers.2.residual")
    # Rank 0's rows are the first ones, and are right up to the attention to later rows: none.
    assert torch.equal(right[:3], wrong[:3])
    assert (right[3:] != wrong[3:]).any(dim=-1).all()


def test_s1_2_without_it_a_norm_that_compares_shapes_fails(mega_ready: None) -> None:
    with undo.residual_left_whole(), pytest.raises(RankFailed, match="must have equal shapes"):
        run(ARM)


def test_s1_3_without_it_aux_of_an_earlier_stage_lack_rows(stepped) -> None:
    with undo.aux_left_sharded():
        step = run(ARM)
    assert [aux.shape[0] for aux in stepped(ARM).aux] == [5, 5]
    assert [aux.shape[0] for aux in step.ranks[-1].aux] == [3, 5]


def test_s1_3_without_any_gather_the_next_stage_lacks_rows(mega_ready: None) -> None:
    with undo.outputs_left_sharded(), pytest.raises(RankFailed):
        run(ARM)


def test_s1_3_without_the_trim_pads_are_handed_on(mega_ready: None) -> None:
    with undo.outputs_left_padded():
        step = run(ARM)
    assert step.ranks[0].handed_on["residual"].shape[0] == 6


def test_s1_3_in_the_wrong_order_aux_are_exchanged(stepped) -> None:
    with undo.local_aux_first():
        step = run(ARM)
    assert all(map(torch.equal, step.aux, reversed(stepped(ARM).aux)))


def test_s1_4_without_it_the_dense_ffn_is_summed_twice(stepped) -> None:
    with undo.dense_mlp_all_reduces():
        step = run(ARM)
    once, twice = (shards(s, "layers.0.ffn") for s in (stepped(ARM), step))
    assert torch.equal(twice, 2 * once), "two equal halves add without rounding"
    # At PP = 1 the layer asks for no reduction, so that the fault cannot show.
    with undo.dense_mlp_all_reduces():
        alone = run(ARM.but(word="tep2"))
    assert torch.equal(alone.logprobs, stepped(ARM.but(word="tep2")).logprobs)


@pytest.mark.parametrize("tokens", [4, 5])
def test_s1_5_without_it_ranks_hand_on_different_tensors(stepped, tokens: int) -> None:
    arm = ARM.but(tokens=tokens)
    with undo.outputs_differ_by_rank():
        step = run(arm)
    one, other = (rank.handed_on["residual"] for rank in step.ranks[:2])
    assert one.shape == other.shape and not torch.equal(one, other)
    # The transport sends each rank's own half; by luck that is right where TP divides T.
    same = torch.equal(step.logprobs, stepped(arm).logprobs)
    assert same == (tokens % 2 == 0)

"""What the overlay says of each tap holds of the ranks' values there."""

from __future__ import annotations

import pytest
import torch

from tests.model.overlay.drive import Arm, Step
from tests.model.overlay.test_agreement import bounds


def full_value(step: Step, name: str, tokens: int) -> torch.Tensor:
    """The tap's full value, put together from the ranks' as is said of it."""
    ranks = [rank for rank in step.ranks if name in rank.seen]
    (said,) = {rank.placements[name] for rank in ranks}
    values = [rank.seen[name] for rank in ranks]
    if said == "shard:tp":
        rows = -(-tokens // len(values))
        assert all(value.shape[0] == rows for value in values)
        return torch.cat(values)[:tokens]
    assert all(value.shape[0] == tokens for value in values)
    if said == "partial:tp":
        assert not torch.equal(values[0], values[1])
        return torch.stack([value.double() for value in values]).sum(dim=0)
    assert said == "replicate"
    assert all(torch.equal(values[0], value) for value in values)
    return values[0]


@pytest.mark.parametrize("layers", ["dmmd", "mmmm"])
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("word", ["tep1", "tep2", "tep4", "tep2pp2", "tep4pp2"])
def test_taps_put_together_are_the_reference(stepped, word: str, sp: bool, layers: str) -> None:
    arm = Arm(word=word, layers=layers, tokens=5, sp=sp)
    step = stepped(arm)
    bound = bounds(arm, step)
    said = {name for rank in step.ranks for name in rank.placements}
    assert said == {name for rank in step.ranks for name in rank.seen}
    for name in said:
        value = full_value(step, name, arm.tokens)
        if name.endswith("experts_chosen"):
            assert torch.equal(value.sort(dim=-1).values, bound.result.taps[name])
        else:
            error = (value.double() - bound.result.taps[name]).abs().max()
            assert error <= bound.taps[name], name


def test_the_words(stepped) -> None:
    def said(**changes: object) -> dict[str, str]:
        arm = Arm(word="tep2", layers="dm", **changes)
        return stepped(arm).ranks[0].placements

    assert said() == {
        "layers.0.attn": "partial:tp",
        "layers.0.residual": "shard:tp",
        "layers.0.ffn": "shard:tp",
        "layers.0.stream": "shard:tp",
        "layers.1.attn": "partial:tp",
        "layers.1.residual": "shard:tp",
        "layers.1.ffn": "shard:tp",
        "layers.1.router": "shard:tp",
        "layers.1.experts_chosen": "shard:tp",
        "layers.1.stream": "shard:tp",
        "norm": "shard:tp",
    }
    whole = said(sp=False)
    assert whole["layers.0.ffn"] == "partial:tp", "left to the next norm at PP = 1"
    assert whole["layers.1.ffn"] == whole["layers.1.residual"] == whole["norm"] == "replicate"
    assert whole["layers.1.router"] == "shard:tp", "MegaMoE takes a rank's own tokens"
    own = said(mega=False)
    assert own["layers.1.ffn"] == "partial:tp" and own["layers.1.router"] == "replicate"

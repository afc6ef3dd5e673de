"""What the ranks' local values make up: replicated, partial sums, or shards of the tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import Placement, PlacementError
from sim import Topology
from tests.properties.captures import full

PARTIAL, SHARD = Placement("partial"), Placement("shard")


@pytest.mark.parametrize(
    ("text", "placement", "shown"),
    [
        ("replicate", Placement(), "Replicate"),
        ("partial:tp", Placement("partial", "tp"), "Partial(tp)"),
        ("partial:ep", Placement("partial", "ep"), "Partial(ep)"),
        ("partial:dp", Placement("partial", "dp"), "Partial(dp)"),
        ("shard:tp", Placement("shard", "tp"), "Shard(tokens, tp)"),
    ],
)
def test_a_declaration_is_a_placement(text: str, placement: Placement, shown: str) -> None:
    assert Placement.parse(text) == placement
    assert str(placement) == shown


@pytest.mark.parametrize(
    "text", ["", "Replicate", "replicate:tp", "partial", "partial:", "partial:pp", "shard:0"]
)
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlacementError, match="use replicate, partial:tp") as caught:
        Placement.parse(text)
    assert "\n" not in str(caught.value)


def test_each_rank_has_a_replicated_value() -> None:
    local = {0: full(), 1: full() + 1}
    values = Placement().full_values(Topology.parse("tp2"), local, 4)
    assert values.keys() == {(0,), (1,)}
    assert torch.equal(values[1,], local[1])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_each_group_has_the_sum_of_its_partial_values(tp: int, pp: int, dp: int) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp)
    local = {
        rank: torch.full((2, 2), float(2**rank), dtype=torch.float32)
        for rank in range(topology.world_size)
    }
    values = PARTIAL.full_values(topology, local, 2)
    assert set(values) == set(topology.groups["tp"])
    for group, value in values.items():
        assert value.dtype == torch.float64
        assert (value == sum(2.0**rank for rank in group)).all()


def test_partial_sums_are_added_without_rounding() -> None:
    """In bfloat16, 256 + 1 would be 256."""
    parts = [torch.tensor([[x]], dtype=torch.bfloat16) for x in (256.0, 1.0)]
    assert float(PARTIAL.combine(parts, 1)) == 257.0


@given(st.integers(0, 9), st.integers(1, 4))
def test_shards_follow_one_another_and_padding_is_dropped(tokens: int, ranks: int) -> None:
    rows = math.ceil(tokens / ranks)
    padded = torch.full((rows * ranks, 3), math.nan, dtype=torch.float64)
    padded[:tokens] = full(tokens)
    parts = [padded[rank * rows : (rank + 1) * rows] for rank in range(ranks)]
    assert torch.equal(SHARD.combine(parts, tokens), full(tokens))


def test_a_shard_has_its_padding_rows() -> None:
    with pytest.raises(PlacementError, match="3 rows where its shard of 4 tokens has 2"):
        SHARD.combine([full(3), full(3)], 4)


@pytest.mark.parametrize("placement", [PARTIAL, SHARD], ids=str)
def test_shapes_must_fit_together(placement: Placement) -> None:
    with pytest.raises(PlacementError, match="shapes differ"):
        placement.combine([full(2), full(3)], 4)


@pytest.mark.parametrize("placement", [PARTIAL, SHARD], ids=str)
def test_a_group_without_the_value_has_none(placement: Placement) -> None:
    values = placement.full_values(Topology.parse("tp2pp2"), {2: full(2), 3: full(2)}, 4)
    assert set(values) == {(2, 3)}


@pytest.mark.parametrize("placement", [PARTIAL, SHARD], ids=str)
def test_a_value_on_part_of_a_group_is_refused(placement: Placement) -> None:
    with pytest.raises(PlacementError, match=r"ranks \[2\] of \[2, 3\]"):
        placement.full_values(Topology.parse("tp2pp2"), {r: full(2) for r in range(3)}, 4)

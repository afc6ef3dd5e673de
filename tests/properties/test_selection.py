"""Chosen blocks: heads over ranks, and what a wrong choice is said to be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from properties import Placement, PlacementError, TapVerdict, compare_taps
from properties.poison import no_poison
from sim import Topology

GENERATOR = torch.Generator().manual_seed(7)
TOKENS, HEADS, CHOSEN, BLOCKS = 12, 4, 3, 6


@dataclass(frozen=True)
class Tap:
    value: torch.Tensor
    declared: str = f"heads:tp:{HEADS}"


def choice() -> torch.Tensor:
    """Sorted random choices [T, G, K] that have the last block, and -1 in the first row."""
    scores = torch.rand(TOKENS, HEADS, BLOCKS - 1, generator=GENERATOR)
    chosen = scores.topk(CHOSEN - 1).indices.sort(dim=-1).values
    last = torch.full((TOKENS, HEADS, 1), BLOCKS - 1)
    made = torch.cat((chosen, last), dim=-1)
    made[0] = torch.tensor([0, -1, -1])
    return made


TRUTHS = {f"layers.{layer}.blocks_chosen": choice() for layer in range(3)}
NAMES = [*TRUTHS]


def spread(full: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Each rank's heads."""
    own = [rank * HEADS // ranks for rank in range(ranks)]
    width = max(1, HEADS // ranks)
    return [full[:, first : first + width] for first in own]


def judged(
    taps: dict[str, list[torch.Tensor]], ranks: int, declared: str = f"heads:tp:{HEADS}"
) -> list[TapVerdict]:
    captured = [
        {name: Tap(of_ranks[rank], declared) for name, of_ranks in taps.items()}
        for rank in range(ranks)
    ]
    bounds = dict.fromkeys(TRUTHS, 0.0)
    return compare_taps(Topology.parse(f"tp{ranks}"), captured, TRUTHS, bounds)


def right(ranks: int) -> dict[str, list[torch.Tensor]]:
    return {name: spread(full, ranks) for name, full in TRUTHS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_right_choice_holds_with_heads_cut_and_repeated(ranks: int) -> None:
    verdicts = judged(right(ranks), ranks)
    assert all(tap.ok for tap in verdicts)
    assert {tap.expected for tap in verdicts} == {"Shard(heads, tp)"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_wrong_id_on_one_rank_is_found(ranks: int) -> None:
    taps = right(ranks)
    local = taps[NAMES[1]][ranks - 1].clone()
    row = int((local[:, 0, 0] == 0).nonzero()[-1])
    local[row, 0, 0] = next(b for b in range(BLOCKS) if b not in local[row, 0].tolist())
    taps[NAMES[1]][ranks - 1] = local
    wrong = [tap for tap in judged(taps, ranks) if not tap.ok]
    assert [(tap.name, tap.kind, tap.rows) for tap in wrong] == [(NAMES[1], "wrong blocks", (row,))]
    # Of repeated heads only the set of ranks that has the wrong one is named.
    if ranks == 8:
        assert "ranks [1, 3, 5, 7]" in wrong[0].where


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_choice_of_the_layer_before_is_stale(ranks: int) -> None:
    taps = right(ranks)
    taps[NAMES[2]] = taps[NAMES[1]]
    (wrong,) = [tap for tap in judged(taps, ranks) if not tap.ok]
    assert (wrong.name, wrong.kind) == (NAMES[2], "stale")
    assert wrong.why.startswith(f"is what {NAMES[1]} was")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_choice_of_another_rank_is_of_wrong_heads(ranks: int) -> None:
    taps = right(ranks)
    step = max(1, ranks // HEADS)
    taps[NAMES[0]] = taps[NAMES[0]][step:] + taps[NAMES[0]][:step]
    (wrong,) = [tap for tap in judged(taps, ranks) if not tap.ok]
    ahead = max(1, HEADS // ranks)
    theirs = ", ".join(str((head + ahead) % HEADS) for head in range(HEADS))
    assert (wrong.name, wrong.kind) == (NAMES[0], "wrong heads")
    assert wrong.why == f"index heads 0, 1, 2, 3 have the blocks of heads {theirs}"


def test_two_heads_of_one_rank_that_are_turned_are_named() -> None:
    taps = right(2)
    taps[NAMES[0]][1] = taps[NAMES[0]][1].flip(1)
    (wrong,) = [tap for tap in judged(taps, 2) if not tap.ok]
    assert wrong.kind == "wrong heads"
    assert wrong.why == "index heads 2, 3 have the blocks of heads 3, 2"


def test_blocks_of_the_future_and_too_few_blocks_are_said() -> None:
    taps = right(1)
    future = TRUTHS[NAMES[0]].clone()
    future[0, 0] = torch.tensor([0, 1, -1])
    taps[NAMES[0]] = [future]
    fewer = TRUTHS[NAMES[1]].clone()
    fewer[3, 2] = torch.tensor([int(fewer[3, 2, 0]), BLOCKS - 1, -1])
    taps[NAMES[1]] = [fewer]
    said = {tap.name: tap.why for tap in judged(taps, 1) if not tap.ok}
    assert said[NAMES[0]] == "has blocks after the token's own"
    assert said[NAMES[1]] == "has fewer blocks than the token may choose"


@pytest.mark.parametrize("garbage", [0, 2**31 - 1, -7])
def test_memory_that_no_indexer_wrote_is_no_choice(garbage: int) -> None:
    taps = right(2)
    taps[NAMES[1]] = [torch.full_like(part, garbage) for part in taps[NAMES[1]]]
    (wrong,) = [tap for tap in judged(taps, 2) if not tap.ok]
    assert (wrong.name, wrong.kind) == (NAMES[1], "not computed")
    assert wrong.why.startswith("is no choice")


def test_other_numbers_of_heads_and_ranks_without_it_are_said() -> None:
    taps = right(2)
    taps[NAMES[0]] = [part[:, :1] for part in taps[NAMES[0]]]
    wrong = next(tap for tap in judged(taps, 2) if not tap.ok)
    assert wrong.kind == "wrong shape" and "of 4" in wrong.why
    some = [{NAMES[0]: Tap(TRUTHS[NAMES[0]][:, :2])}, {}]
    truth = {NAMES[0]: TRUTHS[NAMES[0]]}
    (verdict,) = compare_taps(Topology.parse("tp2"), some, truth, {NAMES[0]: 0.0})
    assert verdict.kind == "ranks differ"


def test_poison_among_ids_is_no_poison_of_values() -> None:
    # -1 and any other integer is an id; only the oracle judges those.
    captured = [{NAMES[0]: Tap(TRUTHS[NAMES[0]])}]
    assert no_poison(Topology.parse("tp1"), TOKENS, captured).ok


@pytest.mark.parametrize("text", ["heads", "heads:tp", "heads:tp:0", "heads:tp:x", "heads:pp:4"])
def test_a_declaration_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="heads:tp:4"):
        Placement.parse(text)

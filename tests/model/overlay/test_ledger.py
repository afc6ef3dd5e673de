"""Which exchanges a step makes, as data: each part's operations over the TP ranks, and their bytes.

Bytes are those that cross between ranks by the ring algorithm, of R ranks and P padded rows of H
features: (R - 1) * P * H * 2 for an all-gather and for a reduce-scatter, twice that for an
all-reduce.
"""

from __future__ import annotations

import pytest

from sim import Entry
from tests.model.overlay.drive import Arm

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"

EMBED = [REDUCE]
"""The vocabulary is sharded, and each rank has all tokens' ids."""
ATTENTION = [GATHER, SCATTER]
DENSE = [GATHER, SCATTER]
MEGA_MOE: list[str] = []
"""Its exchanges are MegaMoE's own, over the expert-parallel group."""
STAGE_EXIT = [GATHER]
FINAL = [GATHER]
LOGITS = [GATHER]


def on_tp(ledger: list[Entry], ranks: tuple[int, ...]) -> list[Entry]:
    """What the TP group of `ranks` did."""
    return [entry for entry in ledger if entry.group == "tp" and entry.ranks == ranks]


def layers(pattern: str) -> list[str]:
    return [op for letter in pattern for op in ATTENTION + (DENSE if letter == "d" else MEGA_MOE)]


@pytest.mark.parametrize("pattern", ["dmmm", "mmmm", "dddm", "mmmd"])
@pytest.mark.parametrize("aux", [(), (0, 1, 3, 4)])
def test_every_exchange_of_two_stages(stepped, pattern: str, aux: tuple[int, ...]) -> None:
    arm = Arm(word="tep2pp2", layers=pattern, aux=aux)
    ledger = stepped(arm).ledger
    first = [entry.op for entry in on_tp(ledger, (0, 1))]
    assert first == EMBED + layers(pattern[:2]) + STAGE_EXIT
    # The transport gathers each tensor that it received.
    received = [GATHER] * (2 + sum(layer <= 2 for layer in aux))
    last = [entry.op for entry in on_tp(ledger, (2, 3))]
    assert last == received + layers(pattern[2:]) + FINAL + LOGITS


@pytest.mark.parametrize(("aux", "packed"), [((), 2), ((1,), 3), ((0, 1, 2, 3), 5)])
def test_a_stage_exit_is_one_exchange_of_everything(
    stepped, aux: tuple[int, ...], packed: int
) -> None:
    arm = Arm(word="tep4pp2", tokens=5, aux=aux)
    entry = on_tp(stepped(arm).ledger, (0, 1, 2, 3))[-1]
    assert entry.op == GATHER
    assert entry.shapes[0] == ((2, packed * arm.tiny.hidden_size),)


@pytest.mark.parametrize("aux", [(), (3, 4)])
def test_the_final_gather_is_one_exchange_of_what_the_stage_has(
    stepped, aux: tuple[int, ...]
) -> None:
    arm = Arm(word="tep2pp2", aux=aux)
    entry = on_tp(stepped(arm).ledger, (2, 3))[-2]
    assert entry.op == GATHER
    assert entry.shapes[0] == ((4, (1 + len(aux)) * arm.tiny.hidden_size),)


@pytest.mark.parametrize("word", ["tep2", "tep4", "tep2pp2", "tep4pp2"])
@pytest.mark.parametrize("pattern", ["dmmm", "mmmd"])
def test_no_layer_all_reduces_its_stream(stepped, word: str, pattern: str) -> None:
    arm = Arm(word=word, layers=pattern)
    for entry in stepped(arm).ledger:
        if entry.op == REDUCE:
            assert entry is stepped(arm).ledger[0], "only the embedding sums all tokens"


@pytest.mark.parametrize(("tp", "tokens"), [(2, 8), (4, 8), (4, 5)])
def test_bytes_of_a_layer_are_those_of_theory(stepped, tp: int, tokens: int) -> None:
    rows = -(-tokens // tp) * tp
    gather = (tp - 1) * rows * Arm(word="tp1").tiny.hidden_size * 2
    for pattern, exchanges in [("d", 4), ("m", 2)]:
        arm = Arm(word=f"tep{tp}", layers=pattern, tokens=tokens)
        entries = on_tp(stepped(arm).ledger, tuple(range(tp)))
        in_layer = entries[len(EMBED) : -len(FINAL + LOGITS)]
        assert [entry.bytes for entry in in_layer] == [gather] * exchanges
        # An all-reduce moves as much as a gather and a scatter: attention costs the same, a
        # dense FFN too, and an MoE layer saves the gather of its result.
        whole = on_tp(stepped(arm.but(sp=False)).ledger, tuple(range(tp)))
        whole = whole[len(EMBED) : -len(LOGITS)]
        if tokens % tp == 0:
            saved = gather if pattern == "m" else 0
            assert sum(e.bytes for e in in_layer) == sum(e.bytes for e in whole) - saved


def test_mega_moe_moves_the_same_with_and_without_sequence_parallelism(stepped) -> None:
    def over_ep(arm: Arm) -> list[tuple[str, object, int]]:
        # Without the barrier before the first launch on a group.
        moved = [e for e in stepped(arm).ledger if e.group == "ep" and e.op != "barrier"]
        return [(e.op, e.shapes, e.bytes) for e in moved]

    arm = Arm(word="tep4pp2", tokens=5)
    assert over_ep(arm) and over_ep(arm) == over_ep(arm.but(sp=False))

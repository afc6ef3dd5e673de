"""Faults that a number of tokens, a backend or a missing field hides, and the right twin of one."""

from __future__ import annotations

import pytest

from properties.faults import FAULTS, aux, aux_shards, deferred
from properties.faults.patches import MEGA
from tests.properties.faults import trials


@pytest.mark.parametrize(
    ("name", "word", "tokens"),
    [
        ("sp-gather-by-row-count", "tep4", 5),
        ("sp-fallback-forgets-attention", "tep4", 4),
        ("sp-final-gather-keeps-pads", "tep4", 8),
        ("sp-scatter-pads-in-front", "tep4", 8),
        # A skipped scatter needs one token.
        ("sp-one-token-not-reduced", "tep2", 5),
        # The frozen decision is right for the batch that it was taken for.
        ("reduce-decision-frozen", "tp2pp2", deferred.CAPTURED_FOR),
        # A batch that is not split is scaled once.
        ("routed-scaling-twice-in-overlap", "tp2", 3),
    ],
)
def test_hides_by_the_number_of_tokens(name: str, word: str, tokens: int) -> None:
    fault = FAULTS[name]
    assert trials.judged(trials.example(fault, word, seq_lens=(tokens,)), fault.apply()) is None


@pytest.mark.parametrize(
    "name", ["moe-reduced-by-model-again", "shared-expert-reduced-first", "residual-in-the-moe-sum"]
)
def test_faults_of_the_runner_hide_with_mega_moe(name: str) -> None:
    fault = FAULTS[name]
    one = trials.example(fault, "tep2pp2", without=dict(fault.needs), **dict([MEGA]))
    assert trials.judged(one, fault.apply()) is None


# Without aux hidden states this one still crosses the parts of the stream.
OF_AUX_ALONE = [
    fault
    for fault in (*aux.FAULTS, *aux_shards.FAULTS)
    if fault.name != "aux-unpacked-out-of-order"
]


@pytest.mark.parametrize("name", [fault.name for fault in OF_AUX_ALONE])
def test_hides_where_no_aux_is_asked_for(name: str) -> None:
    fault = FAULTS[name]
    one = trials.example(fault, fault.shows[0], without=["aux"])
    assert trials.judged(one, fault.apply()) is None


def test_the_cross_match_hides_without_aux_hidden_states() -> None:
    fault = FAULTS["aux-transfer-cross-matches"]
    one = trials.example(fault, "tp2pp3", without=dict(fault.needs), layers="dmd")
    assert trials.judged(one, fault.apply()) is None


def test_a_buffer_reused_in_flight_hides_where_delivery_is_prompt() -> None:
    fault = FAULTS["send-buffer-reused"]
    one = trials.example(fault, "tp2pp2", without=dict(fault.needs))
    assert trials.judged(one, fault.apply()) is None


@pytest.mark.parametrize("word", ["tp2pp2", "tep4pp2"])
def test_the_repair_of_both_halves_is_right(word: str) -> None:
    """The twin of the pair: the next norm reduces for the experts, and for nobody else."""
    fault = FAULTS["dense-doubled-by-the-repair"]
    one = trials.example(fault, word, without=dict(fault.needs), layers="dmdm")
    assert trials.judged(one, deferred.norm_reduces(after_dense_too=False)) is None

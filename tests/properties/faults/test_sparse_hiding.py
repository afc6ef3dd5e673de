"""Faults of KV caches and chosen blocks, and their near twins that are right."""

from __future__ import annotations

import pytest

from model.subject import prepare
from properties.faults import FAULTS
from tests.properties.faults import trials


@pytest.fixture(scope="module", autouse=True)
def m3() -> None:
    """vLLM's modules, with the overrides installed: faults patch them."""
    prepare()


@pytest.mark.parametrize(
    "name", ["blocks-of-the-layer-before", "index-heads-turned", "index-slots-one-on"]
)
def test_a_wrong_choice_hides_where_no_block_is_dropped(name: str) -> None:
    """Twelve tokens have three blocks, and so many are chosen: every choice is the same."""
    fault = FAULTS[name]
    one = trials.example(fault, "tp1", seq_lens=(12,))
    assert trials.judged(one, fault.apply()) is None


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("decode-positions-one-late", "decode"),
        ("chunk-not-cached-at-stage-1", "chunk"),
        ("chunk-forgets-its-context", "chunk"),
    ],
)
def test_a_fault_of_later_steps_hides_in_one_step(name: str, without: str) -> None:
    fault = FAULTS[name]
    one = trials.example(fault, fault.shows[0], without=[without])
    assert trials.judged(one, fault.apply()) is None


def test_block_tables_in_another_order_hide_with_one_request() -> None:
    fault = FAULTS["block-table-of-another-request"]
    one = trials.example(fault, "tp1", seq_lens=(16,))
    assert trials.judged(one, fault.apply()) is None


@pytest.mark.parametrize("name", ["slot-mapping-missing", "slots-one-on", "index-slots-one-on"])
def test_faults_of_sparse_layers_hide_with_dense_attention(name: str) -> None:
    fault = FAULTS[name]
    one = trials.example(fault, "tp1", without=["attention"])
    assert trials.judged(one, fault.apply()) is None


def test_the_step_the_request_and_the_position_are_named() -> None:
    fault = FAULTS["decode-positions-one-late"]
    verdict = trials.judged(trials.example(fault, "tp2"), fault.apply())
    assert verdict is not None
    assert verdict.where.startswith("step 1: decode of request 0; request 0, position 7; layers.0")

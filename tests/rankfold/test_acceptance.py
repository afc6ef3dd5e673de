"""The topologies, batches and dtypes for which `rankfold check` must hold."""

import pytest

from rankfold.check import Options, run_check
from rankfold.report import Report
from sim import Topology

WORDS = ["tp1", "tp2", "tp4", "pp2", "tp2pp2", "tep2pp2", "tep4pp2", "tp2pp4", "tep8"]


def check(word: str, against: str | None = None, **options: object) -> Report:
    """Run a check without showing progress."""
    other = Topology.parse(against) if against else None
    return run_check(
        Options(topology=Topology.parse(word), against=other, **options),  # type: ignore[arg-type]
        progress=lambda text: None,
    )


@pytest.mark.parametrize("word", WORDS)
def test_every_topology_holds(word: str) -> None:
    report = check(word)
    assert report.ok, report.headline
    assert report.ranks == Topology.parse(word).world_size


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("word", ["tep2pp2", "tp4"])
def test_every_number_of_tokens_holds(word: str, tokens: int) -> None:
    report = check(word, tokens=tokens)
    assert report.ok, report.headline


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_holds(dtype: str) -> None:
    report = check("tep2pp2", dtype=dtype)
    assert report.ok, report.headline


@pytest.mark.parametrize("layers", ["mmmm", "dddm", "mmmd", "dm"])
def test_every_layer_pattern_holds(layers: str) -> None:
    report = check("tp2pp2", layers=layers, sequences=3)
    assert report.ok, report.headline


@pytest.mark.parametrize("word", ["tp2pp2", "tp2pp4"])
def test_stages_do_not_change_a_bit(word: str) -> None:
    report = check(word, against="tp2", tokens=33)
    assert report.ok, report.headline
    assert report.against is not None
    assert report.against.max_abs_delta == 0
    assert report.against.bound == 0


def test_another_tp_degree_agrees_within_rounding() -> None:
    report = check("tp4", against="tp2")
    assert report.ok, report.headline
    assert report.against is not None
    assert 0 < report.against.max_abs_delta <= report.against.bound


def test_a_check_is_deterministic() -> None:
    first, second = check("tep2pp2", seed=3), check("tep2pp2", seed=3)
    assert first.taps == second.taps
    assert first.ledger == second.ledger


def test_the_ledger_has_the_expected_exchange() -> None:
    """TP2, PP2, d m m m: 2 all-reduces a layer and one of the embedding; the last stage gathers
    logits; each stage boundary sends 2 tensors, whose slices the receivers gather over TP."""
    report = check("tp2pp2")
    by_op = report.ledger.by_op
    stages_tp_groups = 2
    # A stage's TP group reduces in its own two layers; only the first has the embedding.
    assert by_op["all_reduce"].count == stages_tp_groups * 2 * 2 + 1
    assert by_op["all_gather_into_tensor"].count == 2 + 1
    tokens, hidden, size = 8, 64, 4
    assert by_op["all_reduce"].bytes == 9 * 2 * tokens * hidden * size

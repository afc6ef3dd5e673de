"""Taps: which there are on each rank, what they hold, and what the code declares of them."""

import pytest
import torch

from model.subject import StepResult
from model.taps import REPLICATE, Recorder
from model.tiny import TinyM3

LAYERS = TinyM3().layers
PARTIAL_TP = "partial:tp"


def layer_taps(i: int) -> list[str]:
    moe = ["router", "experts_chosen"] if LAYERS[i] == "m" else []
    return [f"layers.{i}.{part}" for part in ["attn", "residual", *moe, "ffn"]]


def whole(results: list[StepResult], name: str) -> torch.Tensor:
    """The full value of a tap: any rank's if replicated, the sum over TP ranks if partial."""
    captured = [r.taps[name] for r in results if name in r.taps]
    declared = {tap.declared for tap in captured}
    assert len(declared) == 1, (name, declared)
    if declared == {PARTIAL_TP}:
        assert len(captured) > 1
        return torch.stack([tap.value for tap in captured]).sum(dim=0)
    assert all(torch.equal(tap.value, captured[0].value) for tap in captured), name
    return captured[0].value


def test_taps_by_stage_in_the_order_of_the_computation(fold) -> None:
    first, last = fold("tp2pp2")[0], fold("tp2pp2")[3]
    sent = ["stage.0.send.hidden_states", "stage.0.send.residual"]
    received = ["stage.1.recv.hidden_states", "stage.1.recv.residual"]
    assert (first.stage, last.stage) == (0, 1)
    assert list(first.taps) == [
        "embed",
        *layer_taps(0),
        "layers.0.stream",
        *layer_taps(1),
        *sent,
    ]
    assert list(last.taps) == [
        *received,
        "layers.1.stream",
        *layer_taps(2),
        "layers.2.stream",
        *layer_taps(3),
        "layers.3.stream",
        "norm",
        "logits",
        "logprobs",
    ]


@pytest.mark.parametrize("word", ["tp2", "tp4", "pp2", "tp2pp2", "tep4pp2", "tep8"])
def test_every_tap_read_as_declared_is_that_of_one_rank(fold, word: str) -> None:
    expected, results = fold("tp1")[0].taps, fold(word)
    for name, tap in expected.items():
        value = whole(results, name)
        assert value.shape == tap.value.shape
        if name.endswith("experts_chosen"):
            assert torch.equal(value, tap.value)
        else:
            assert (value - tap.value).abs().max() < 1e-4, name


def test_declared_follows_the_flags_of_the_code(fold) -> None:
    def declared(word: str, part: str) -> set[str]:
        return {
            tap.declared
            for result in fold(word)
            for name, tap in result.taps.items()
            if name.split(".")[-1] == part
        }

    assert declared("tp1", "attn") == declared("tp1", "ffn") == {REPLICATE}
    # At PP 1 the FFN leaves its sum to the next norm; with stages it sums itself.
    assert declared("tp2", "attn") == declared("tp2", "ffn") == {PARTIAL_TP}
    assert declared("tp2pp2", "attn") == {PARTIAL_TP}
    assert declared("tp2pp2", "ffn") == {REPLICATE}


def test_partial_taps_really_are_partial(fold) -> None:
    results = fold("tp2")
    assert not torch.equal(
        results[0].taps["layers.1.ffn"].value, results[1].taps["layers.1.ffn"].value
    )


def test_what_is_sent_is_what_arrives(fold) -> None:
    results = fold("tp2pp2")
    for key in ("hidden_states", "residual"):
        sent = results[0].taps[f"stage.0.send.{key}"].value
        assert torch.equal(results[2].taps[f"stage.1.recv.{key}"].value, sent)


def test_captures_outlive_the_in_place_updates(fold) -> None:
    taps = fold("tp1")[0].taps
    stream = taps["embed"].value
    for i in range(len(LAYERS)):
        stream = stream + taps[f"layers.{i}.attn"].value
        assert torch.allclose(taps[f"layers.{i}.residual"].value, stream, atol=1e-5)
        stream = stream + taps[f"layers.{i}.ffn"].value


def test_chosen_experts_are_sorted_and_distinct(fold) -> None:
    tiny = TinyM3()
    for i in tiny.moe_layers:
        chosen = fold("tep4")[2].taps[f"layers.{i}.experts_chosen"].value
        assert chosen.shape == (8, tiny.num_experts_per_tok) and chosen.dtype == torch.int64
        assert (chosen.diff(dim=-1) > 0).all()
        assert chosen.min() >= 0 and chosen.max() < tiny.num_local_experts


def test_a_recorder_copies_and_refuses_a_second_passage() -> None:
    recorder, value = Recorder(), torch.ones(2)
    recorder.record("x", value)
    assert recorder.stop() == {}
    recorder.start()
    recorder.record("x", value)
    value.zero_()
    with pytest.raises(RuntimeError, match="tap x was passed twice in one step"):
        recorder.record("x", value)
    assert recorder.stop()["x"].value.tolist() == [1.0, 1.0]

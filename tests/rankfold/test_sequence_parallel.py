"""`rankfold check` with sequence parallelism: holds, and fails when a piece is undone."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest
import torch

from model.batch import Batch
from model.subject import prepare
from properties import Verdict
from properties.faults import overlay as undo
from rankfold.check import Options, run_check
from rankfold.cli import main
from rankfold.report import Report
from rankfold.rig import Rig
from sim import Topology

MEGA = "deep_gemm_mega_moe"


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """vLLM imported: the undoings patch the overlay's classes, which need it."""
    prepare()


def options(word: str, against: str | None = None, **more: object) -> Options:
    other = Topology.parse(against) if against else None
    topology = Topology.parse(word)
    return Options(topology=topology, against=other, moe_backend=MEGA, **more)  # type: ignore[arg-type]


def check(word: str, against: str | None = None, **more: object) -> Report:
    return run_check(options(word, against, **more), progress=lambda text: None)


def failed(report: Report, name: str) -> Verdict:
    verdict = next(v for v in report.checks if v.name == name)
    assert not verdict.ok
    return verdict


@pytest.mark.parametrize("word", ["tep2", "tep4", "tep2pp2", "tep4pp2", "tep2pp4", "tep8"])
def test_every_topology_holds(word: str) -> None:
    report = check(word, tokens=5, aux=(1, 3))
    assert report.ok, report.headline
    assert report.subject.sequence_parallel
    assert report.subject.model == "overlay"
    placed = {tap.name: tap.expected for tap in report.taps}
    assert placed["layers.1.residual"] == "Shard(tokens, tp)"
    assert placed["layers.1.ffn"] == "Shard(tokens, tp)"
    assert placed["aux.1"] == placed["aux.3"] == placed["logprobs"] == "Replicate"


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 33])
def test_every_number_of_tokens_holds(tokens: int) -> None:
    report = check("tep4pp2", tokens=tokens)
    assert report.ok, report.headline


@pytest.mark.parametrize("layers", ["mmmm", "dddm", "mdmd"])
def test_a_dense_layer_may_be_the_first_or_the_last_of_a_stage(layers: str) -> None:
    report = check("tep2pp2", layers=layers, tokens=3, aux=(0, 2, 4))
    assert report.ok, report.headline


def test_mxfp8_experts_hold() -> None:
    report = check("tep2pp2", expert_dtype="mxfp8", tokens=5)
    assert report.ok, report.headline
    assert "mxfp8" in report.subject.moe_backend


@pytest.mark.parametrize("sp", ["auto", "off"])
@pytest.mark.parametrize("word", ["tep2pp2", "tep2pp4"])
def test_stages_do_not_change_a_bit(word: str, sp: str) -> None:
    report = check(word, against="tep2", tokens=33, sp=sp)
    assert report.ok, report.headline
    assert report.against is not None and report.against.max_abs_delta == 0
    assert report.subject.sequence_parallel is (sp == "auto")


PROMPTS = (31, 52, 64, 77, 90, 97)
"""Lengths of six prompts; each but its first token is scored: 405 positions in all (S1-6)."""


def scored(word: str) -> torch.Tensor:
    """The prompt logprobs of the fixed prompts, [405]."""
    chosen = options(word)
    tokens = torch.randint(
        chosen.tiny.vocab_size, (sum(PROMPTS),), generator=torch.Generator().manual_seed(405)
    )
    batch = Batch.of(tokens, PROMPTS)
    with Rig() as rig:
        outcome = rig.step(chosen, batch)
    assert outcome.facts["sequence_parallel"]
    ends = torch.tensor(PROMPTS).cumsum(0) - 1
    scoring = [i for i in range(len(tokens)) if i not in set(ends.tolist())]
    return outcome.logprobs[scoring, tokens[[i + 1 for i in scoring]]]


def test_prompt_logprobs_of_405_positions_are_those_of_one_stage() -> None:
    one = scored("tep2")
    assert one.shape == (405,)
    for word in ("tep2pp2", "tep2pp4"):
        assert (scored(word) - one).abs().max() == 0


def test_without_sequence_parallelism_the_result_is_the_same_within_bound() -> None:
    on, off = check("tep4pp2", tokens=7), check("tep4pp2", tokens=7, sp="off")
    assert off.ok, off.headline
    assert not off.subject.sequence_parallel
    assert on.ledger.by_op["all_reduce"].count < off.ledger.by_op["all_reduce"].count


def test_without_mega_moe_vllms_own_classes_run() -> None:
    report = run_check(Options(topology=Topology.parse("tep2pp2")), lambda text: None)
    assert report.ok, report.headline
    assert report.subject.model == "vLLM's own"
    assert not report.subject.sequence_parallel


def broken(undone: AbstractContextManager[None], aux: Sequence[int] = (1, 3)) -> Report:
    """A check of TP2 x PP2, dense and MoE in turns, with a piece undone."""
    with undone:
        report = check("tep2pp2", layers="dmdm", tokens=5, aux=tuple(aux))
    assert not report.ok
    return report


def test_undoing_s1_1_is_named() -> None:
    verdict = failed(broken(undo.sequence_parallel_at_one_stage_only()), "sequence parallelism")
    assert verdict.what == "is off, and has to be on"


def test_undoing_s1_2_is_named() -> None:
    verdict = failed(broken(undo.residual_of_the_first_rows()), "oracle")
    assert verdict.where.startswith("layers.1.stream, expected Shard(tokens, tp)")
    assert "rows 3, 4 of 5" in verdict.where


def test_undoing_s1_2_where_a_norm_compares_shapes_breaks_the_run_and_names_the_line() -> None:
    report = broken(undo.residual_left_whole())
    verdict = failed(report, "run")
    assert "rank 2 raised ValueError: gemma_fused_add_rmsnorm" in verdict.what
    assert "vllm/models/minimax_m3/nvidia/model.py" in verdict.what
    assert report.broke is not None and report.broke["kind"] == "rank_failed"
    # What was recorded before it broke is right.
    assert all(tap.ok for tap in report.taps)
    assert report.taps[-1].name.startswith("stage.1.recv")


def test_undoing_s1_3_is_named() -> None:
    verdict = failed(broken(undo.aux_left_sharded()), "oracle")
    assert verdict.where.startswith("stage.0.send.aux_hidden_states_0, expected Replicate")
    assert verdict.why.startswith("looks like Shard(tokens, tp): a gather is missing")


def test_undoing_the_order_of_aux_is_named() -> None:
    verdict = failed(broken(undo.local_aux_first()), "oracle")
    assert verdict.where.startswith("aux.1")


def test_undoing_s1_4_is_named() -> None:
    verdict = failed(broken(undo.dense_mlp_all_reduces()), "oracle")
    assert verdict.where.startswith("layers.0.ffn, expected Shard(tokens, tp)")
    assert verdict.why.startswith("is 2 x the full value: summed over tp once too often")


def test_undoing_s1_5_is_named() -> None:
    report = broken(undo.outputs_differ_by_rank())
    verdict = failed(report, "replication")
    assert "stage.0.send" in verdict.where
    verdict = failed(report, "oracle")
    assert verdict.where.startswith("stage.0.send.hidden_states, expected Replicate")
    assert "are zero: they were dropped" in verdict.why


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "tp2", "--moe-backend", MEGA], "needs expert parallelism"),
        (["check", "tep2", "--moe-backend", "magic"], "use auto, deep_gemm_mega_moe"),
        (["check", "tep2", "--moe-backend", MEGA, "--dtype", "float32"], "bfloat16"),
        (["check", "tep2", "--sp", "on"], "use auto, off"),
        (["check", "tep2", "--aux", "1,x"], "numbers between commas"),
        (["check", "tep2", "--aux", "9"], "use 0 to 4"),
        (["check", "tep3", "--moe-backend", MEGA], "do not divide by 3"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_step_that_breaks_is_exit_code_3_with_a_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with undo.residual_left_whole():
        arguments = ["check", "tep2pp2", "--moe-backend", MEGA, "--tokens", "5", "--json"]
        assert main(arguments) == 3
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["broke"]["kind"] == "rank_failed"

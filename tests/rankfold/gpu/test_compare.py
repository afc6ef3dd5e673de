"""The verdicts on a launch, each beside its near twin; the launch is made of folded runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rankfold.gpu.compare import agreement, of_gpu_tensors, stages, step_times
from rankfold.gpu.folded import folded
from rankfold.gpu.plan import PLAIN, SP_OFF, SP_ON, Plan, Timing, plans, transport_of
from rankfold.gpu.record import Measured, Record
from rankfold.gpu.rows import Row
from sim import Topology

pytestmark = pytest.mark.slow


def plan_of(word: str) -> Plan:
    """Its plain variant alone."""
    [plan] = plans([word], "dense", None)
    return replace(plan, variants=plan.variants[:1])


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    """Folded runs, by topology."""
    return {word: folded(plan_of(word))[PLAIN] for word in ("tp2", "tp2pp2")}


def rows_of(
    measured: dict[str, Measured], change: Callable[[Measured], object] = lambda found: None
) -> dict[str, Row]:
    """The rows of tp2 if the launch gives what folded ranks give, but for a change."""
    theirs = copy.deepcopy(measured["tp2"])
    changed = change(theirs)
    theirs = changed if isinstance(changed, Measured) else theirs
    record = Record(transport="nccl", measured={PLAIN: theirs})
    rows = agreement(plan_of("tp2"), "tp2", record, {PLAIN: measured["tp2"]})
    return {row.name.rpartition(": ")[2]: row for row in rows}


def verdicts(rows: dict[str, Row]) -> dict[str, str]:
    """By the last part of the name."""
    return {name: row.verdict for name, row in rows.items()}


def shifted(name: str, bounds: float) -> Callable[[Measured], None]:
    """Moves one value of rank 1's tap by so many times what is allowed."""

    def change(found: Measured) -> None:
        value = found.outcome.results[1].taps[name].value
        value.view(-1)[3] += bounds * 2 * found.bounds[name]

    return change


def test_the_same_values_pass(measured: dict[str, Measured]) -> None:
    found = rows_of(measured)
    assert verdicts(found) == {"checks": "PASS", "outputs": "PASS", "ledger": "PASS"}
    # Routing aside, every tap of both ranks is compared.
    assert found["outputs"].reason == "46 taps equal bit for bit"


def test_a_value_within_rounding_passes_and_one_beyond_fails(measured: dict[str, Measured]) -> None:
    found = rows_of(measured, shifted("layers.1.ffn", 0.9))
    assert verdicts(found)["outputs"] == "PASS"
    assert "46 taps within bound; nearest: layers.1.ffn" in found["outputs"].reason
    found = rows_of(measured, shifted("layers.1.ffn", 1.1))
    assert verdicts(found) == {"checks": "PASS", "outputs": "FAIL", "ledger": "PASS"}
    assert "layers.1.ffn of rank 1 differs by" in found["outputs"].reason


def test_nothing_is_compared_after_another_choice_of_experts(measured: dict[str, Measured]) -> None:
    """Each side's choice has its own check; what follows from it says nothing about transports."""

    def other_choice(found: Measured) -> None:
        for result in found.outcome.results:
            result.taps["layers.1.experts_chosen"].value[0, 0] += 1
        shifted("layers.1.ffn", 100)(found)

    found = rows_of(measured, other_choice)["outputs"]
    assert (found.verdict, "of 46, up to near ties" in found.reason) == ("PASS", True)
    found = rows_of(measured, lambda m: (other_choice(m), shifted("layers.0.ffn", 2)(m)))["outputs"]
    assert found.verdict == "FAIL"


def test_a_missing_operation_fails(measured: dict[str, Measured]) -> None:
    found = rows_of(measured, lambda m: m.outcome.ledger.entries.pop())
    assert verdicts(found) == {"checks": "PASS", "outputs": "PASS", "ledger": "FAIL"}


def test_the_launch_s_own_checks_are_told(measured: dict[str, Measured]) -> None:
    from properties import Verdict

    bad = Verdict(name="oracle", ok=False, what="layers.0.ffn is off", where="rank 0", why="2 x")
    found = rows_of(measured, lambda m: replace(m, failed=[bad]))
    assert verdicts(found)["checks"] == "FAIL"
    assert found["checks"].reason == "oracle: layers.0.ffn is off (rank 0)"


def test_ranks_that_broke_are_told(measured: dict[str, Measured]) -> None:
    record = Record(transport="nccl", broke="rank 1 raised ValueError: x\n  rank 0 waits")
    [row] = agreement(plan_of("tp2"), "tp2", record, {PLAIN: measured["tp2"]})
    assert (row.verdict, row.reason) == ("FAIL", "the ranks broke: rank 1 raised ValueError: x")


def test_several_stages_equal_one_bit_for_bit(measured: dict[str, Measured]) -> None:
    two = copy.deepcopy(measured["tp2pp2"])
    plan, one = plan_of("tp2pp2"), Record(transport="nccl", measured={PLAIN: measured["tp2"]})
    record = Record(transport="nccl", measured={PLAIN: two})
    assert [row.verdict for row in stages(plan, "p", record, one)] == ["PASS"]
    assert [row.verdict for row in stages(plan, "p", record, None)] == ["N/A"]
    assert not list(stages(plan_of("tp2"), "p", one, one))
    logprobs = two.outcome.logprobs
    torch.nextafter(logprobs[0, :1], torch.tensor([1e9]), out=logprobs[0, :1])
    [row] = stages(plan, "p", record, one)
    assert (row.verdict, "largest difference 4.77e-07" in row.reason) == ("FAIL", True), row


def test_step_times_are_figures() -> None:
    [plan] = plans(["tep2"], "dense", Timing())
    times = {SP_ON: [2.0, 2.2], SP_OFF: [2.1, 2.1]}
    [row] = step_times(plan, "tep2", Record(transport="nccl", step_ms=times))
    assert (row.verdict, row.reason[:30]) == ("PASS", "on 2.00, 2.20 ms; off 2.10, 2.")
    assert "ratio of means 1.000" in row.reason
    [row] = step_times(plan, "tep2", Record(transport="nccl"))
    assert row.verdict == "N/A"
    assert not list(step_times(plan_of("tp2"), "tp2", Record(transport="nccl")))


def test_plans_cover_both_arms_and_begin_with_one_stage() -> None:
    planned = plans(["tep2pp2", "tp2", "tep2", "tp2"], "dense", Timing())
    assert [plan.topology.word for plan in planned] == ["tp2", "tep2", "tep2pp2"]
    assert [[name for name, _ in plan.variants] for plan in planned] == [
        [PLAIN],
        [PLAIN, SP_ON, SP_OFF],
        [PLAIN, SP_ON, SP_OFF],
    ]
    assert [plan.timing is not None for plan in planned] == [False, True, True]
    assert planned[2].alone.word == "tep2"


@pytest.mark.parametrize(
    ("word", "gpus", "transport"),
    [("tp2", 0, "gloo"), ("tp2", 1, "gloo-gpu"), ("tp2", 2, "nccl"), ("tp1", 1, "nccl")],
)
def test_a_gpu_for_each_rank_means_nccl(word: str, gpus: int, transport: str) -> None:
    assert transport_of(Topology.parse(word), gpus) == transport


def test_stages_with_gpu_tensors_send_them_over_the_device_side(
    measured: dict[str, Measured],
) -> None:
    """As an H200 recorded it: announcements on the CPU side, tensors on the other, each with
    numbers of its own. Another message is a difference all the same."""
    entries = measured["tp2pp2"].outcome.ledger.entries
    on_gpu = of_gpu_tensors(entries)
    sends = [entry for entry in on_gpu if entry.op == "send"]
    assert {(e.group, "float" in e.dtype) for e in sends} == {("pp", True), ("pp.cpu", False)}
    for group in ("pp", "pp.cpu"):
        numbers = [e.sequence for e in sends if (e.group, e.ranks) == (group, (0, 2))]
        assert numbers == [*range(len(numbers))]
        assert len(numbers) > 1
    theirs = copy.deepcopy(measured["tp2pp2"])
    theirs.outcome.ledger.entries = on_gpu
    folded_ranks = {PLAIN: measured["tp2pp2"]}

    def ledger() -> Row:
        record = Record(transport="nccl", measured={PLAIN: theirs})
        rows = agreement(plan_of("tp2pp2"), "tp2pp2", record, folded_ranks)
        [row] = [row for row in rows if row.name.endswith(": ledger")]
        return row

    assert ledger().verdict == "PASS"
    # "cuda:0" is longer than "cpu" where a message says what comes next.
    longer = [e._replace(bytes=e.bytes + 3) if e.dtype == "uint8" else e for e in on_gpu]
    assert longer != on_gpu
    theirs.outcome.ledger.entries = longer
    assert ledger().verdict == "PASS"
    theirs.outcome.ledger.entries = [
        e._replace(bytes=e.bytes + 4) if "float" in e.dtype and e.op == "send" else e
        for e in on_gpu
    ]
    assert ledger().verdict == "FAIL"
    theirs.outcome.ledger.entries = on_gpu[:-1]
    assert ledger().verdict == "FAIL"

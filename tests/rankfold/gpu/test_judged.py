"""Full-scale results against the thresholds: each verdict beside its near twin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankfold.errors import UsageError
from rankfold.gpu.judged import full_scale
from rankfold.gpu.readers import Accuracy, Found, Logprobs, Throughput
from rankfold.gpu.rows import Row
from rankfold.gpu.thresholds import Thresholds

PLAIN = Thresholds()


def rows(*found: Found, thresholds: Thresholds = PLAIN) -> list[Row]:
    """The rows of what was read, without those of what was not."""
    return [row for row in full_scale(found, thresholds, "not read") if row.reason != "not read"]


def run(arm: str, speed: float, date: str = "", workload: str = "w") -> Throughput:
    """One run of a benchmark."""
    return Throughput(arm=arm, workload=workload, tokens_per_second=speed, date=date)


LOGPROBS = Logprobs(arm="pp1", prompts=(((5, -1.5), (9, -0.125)), ((18, -0.25),)))


def test_nothing_read_is_not_applicable() -> None:
    found = full_scale([], PLAIN, "not read")
    assert [(row.verdict, row.reason) for row in found] == [("N/A", "not read")] * 3


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.9, "PASS"), (0.8999, "FAIL")])
def test_gsm8k(accuracy: float, verdict: str) -> None:
    [row] = rows(Accuracy(arm="pp2", accuracy=accuracy, questions=1319))
    assert (row.name, row.verdict) == ("GSM8K, pp2", verdict)
    strict = Thresholds.of(["gsm8k=0.95"])
    [row] = rows(Accuracy(arm="pp2", accuracy=0.94, questions=100), thresholds=strict)
    assert row.verdict == "FAIL"
    assert "100 questions of 1319" in row.reason


def test_logprobs_have_to_be_equal_bit_for_bit() -> None:
    twin = replace(LOGPROBS, arm="pp2")
    [row] = rows(LOGPROBS, twin)
    assert (row.verdict, row.reason) == ("PASS", "2 prompts, 3 positions: all equal")
    off = replace(twin, prompts=(((5, -1.5), (9, -0.1250001)), ((18, -0.25),)))
    [row] = rows(LOGPROBS, off)
    assert row.verdict == "FAIL"
    assert "1 differ, most of all position 2 of prompt 0, by 1e-07" in row.reason
    [row] = rows(LOGPROBS, off, thresholds=Thresholds.of(["logprob_delta=0.001"]))
    assert row.verdict == "PASS"


def test_logprobs_of_other_prompts_are_no_comparison() -> None:
    [row] = rows(LOGPROBS, replace(LOGPROBS, arm="pp2", prompts=LOGPROBS.prompts[:1]))
    assert (row.verdict, row.reason[:23]) == ("FAIL", "not of the same prompts")
    [row] = rows(LOGPROBS)
    assert (row.verdict, row.reason) == ("N/A", "only pp1 was read; two are compared")


def test_throughput_of_two_runs_an_arm() -> None:
    """The figures that were published for this change: neutral within the spread of the runs."""
    seen = [run("off", 1654), run("on", 1576), run("off", 1660), run("on", 1659)]
    [row] = rows(*seen)
    assert row.verdict == "PASS"
    assert "off 1654, 1660; on 1576, 1659 tokens/s" in row.reason
    assert "means 2.4% apart, runs of an arm up to 5.0% apart" in row.reason
    [row] = rows(*seen[:3], run("on", 1500))
    assert row.verdict == "FAIL"


def test_throughput_needs_two_arms_and_two_runs_of_each() -> None:
    [row] = rows(run("off", 100), run("on", 50))
    assert (row.verdict, "shows no spread" in row.reason) == ("N/A", True)
    [row] = rows(run("on", 50), run("on", 100))
    assert (row.verdict, "no other arm" in row.reason) == ("N/A", True)
    # What was asked for differs, so these are no two arms.
    found = rows(run("on", 50, workload="a"), run("off", 100, workload="b"))
    assert [row.verdict for row in found] == ["N/A", "N/A"]


def test_runs_that_were_not_in_turns_are_told() -> None:
    turns = [run("on", 10, "1"), run("off", 10, "2"), run("on", 10, "3"), run("off", 10, "4")]
    assert "in turns" not in rows(*turns)[0].reason
    blocks = [run("on", 10, "1"), run("on", 10, "2"), run("off", 10, "3"), run("off", 10, "4")]
    assert "not in turns" in rows(*blocks)[0].reason


@pytest.mark.parametrize("setting", ["gsm8k", "gsm8k=", "gsm8k=2", "gsm9k=0.5", "=1"])
def test_a_wrong_threshold_is_one_line(setting: str) -> None:
    with pytest.raises(UsageError, match="gsm8k, logprob_delta, throughput_loss"):
        Thresholds.of([setting])

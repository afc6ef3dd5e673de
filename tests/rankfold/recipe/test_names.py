"""Names of recipes and files against what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankfold.recipe.words import Degrees, degrees_of
from tests.rankfold.recipe.recipes import lint_edits, rules

NAME = "minimax-m3-vllm-disagg-gb300-3p1d-dep2-dep16-fp8-8k1k"


@pytest.mark.parametrize(
    ("word", "degrees"),
    [
        ("dep16", Degrees(dp=16, ep=True)),
        ("tep8", Degrees(tp=8, ep=True)),
        ("tp4", Degrees(tp=4)),
        ("tep8pp2", Degrees(tp=8, pp=2, ep=True)),
        ("tp4ep4", Degrees(tp=4, ep=True)),
        ("tp4ep1", Degrees(tp=4)),
        ("dp2tp4", Degrees(dp=2, tp=4)),
        ("tp4ep3", None),
        ("ep8", None),
        ("tp0", None),
        ("dep9999", None),
    ],
)
def test_words(word: str, degrees: Degrees | None) -> None:
    assert degrees_of(word) == degrees
    if degrees is not None and word not in ("tp4ep4", "tp4ep1"):
        assert degrees.word == word


@pytest.mark.parametrize(
    ("name", "says", "suggestion"),
    [
        (
            NAME.replace("3p1d-dep2-dep16", "3p2d-dep2-dep8"),
            "3p2d, and the workers are 3p1d; decode dep8, and it is dep16",
            NAME,
        ),
        (NAME.replace("dep2-", "tp2-"), "prefill tp2, and it is dep2", NAME),
        (NAME.replace("dep16", "dp16"), "decode dp16, and it is dep16", NAME),
        (NAME.replace("8k1k", "1k1k"), "isl 1k, and benchmark.isl is 8192", ""),
        (NAME.replace("8k1k", "8k8k"), "osl 8k, and benchmark.osl is 1024", ""),
        (NAME.replace("fp8", "fp4"), "fp4, and model.precision is fp8", NAME),
        (NAME.replace("gb300", "gb200"), "gb200, and resources.gpu_type is gb300", NAME),
        (NAME + "-c256", "c256, and benchmark.concurrencies is 512", NAME + "-c512"),
        (NAME + "-9n", "9 nodes, and there are 6", NAME + "-6n"),
        # Prefill's right word is what decode's was: each is put right in its own place.
        (
            NAME.replace("dep2-dep16", "dep16-dep2"),
            "prefill dep16, and it is dep2; decode dep2, and it is dep16",
            NAME,
        ),
        (NAME + "-eagle3", "eagle3, and decode has no speculative-config", ""),
        ("disagg-gb300-3p1d-tep4", "tep4, and prefill is dep2 and decode is dep16", ""),
    ],
)
def test_a_name_that_says_something_else(
    tmp_path: Path, name: str, says: str, suggestion: str
) -> None:
    (finding,) = lint_edits(tmp_path, (NAME, name)).findings
    assert finding.rule == "name"
    assert says in finding.message
    assert finding.suggestion == (f"write {suggestion}" if suggestion else "")


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        NAME.replace("fp8", "mxfp8"),
        NAME + "-c512",
        NAME + "-6n",
        NAME + "-7n",  # With a node for the head.
        NAME + "-mtp0",
        NAME + "-fp4-kv",  # Two precisions, or two GPUs: of what?
        NAME + "-as-on-gb200",
        "nightly",
        "3p1d",
        "minimax-m3-3p1d-dep16",  # One word may be about either side.
        "dep2-dep8-dep16-comparison",  # Three words are about something else.
        "r\N{LATIN SMALL LETTER E WITH ACUTE}sum\N{LATIN SMALL LETTER E WITH ACUTE}-3p1d",
        "gb300-tuned-step10-tp",
        "kimi-k2.5-8x",
    ],
)
def test_a_name_that_is_right_or_says_nothing(tmp_path: Path, name: str) -> None:
    report = lint_edits(tmp_path, (NAME, name))
    assert not report.findings, report.findings


def test_speculation_in_a_name_is_right_where_decode_speculates(tmp_path: Path) -> None:
    spec = "      max-num-seqs: 256\n"
    edits = ((NAME, NAME + "-eagle3"), (spec, f"{spec}      speculative-config: '{{}}'\n"))
    assert lint_edits(tmp_path, *edits).ok


def test_a_file_that_was_not_renamed(tmp_path: Path) -> None:
    report = lint_edits(tmp_path, name="3p2d-dep2-dep8-8k1k.yaml")
    (finding,) = report.findings
    assert finding.rule == "file-name"
    assert finding.suggestion == "rename it 3p1d-dep2-dep16-8k1k"


def test_where_flags_and_gpus_disagree_the_name_is_not_compared_with_either(
    tmp_path: Path,
) -> None:
    report = lint_edits(tmp_path, ("data-parallel-size: 16", "data-parallel-size: 8"))
    assert rules(report) == ["parallel-size"]


def test_on_one_gpu_experts_are_spread_over_nothing(tmp_path: Path) -> None:
    edits = (
        (NAME, NAME.replace("dep2-", "tp1-")),
        ("gpus_per_prefill: 2", "gpus_per_prefill: 1"),
        ("      data-parallel-size: 2\n", "      data-parallel-size: 1\n"),
        ("prefill_nodes: 2", "prefill_nodes: 1"),
    )
    report = lint_edits(tmp_path, *edits, name="r.yaml")
    assert set(rules(report)) == {"stale-comment"}  # The comments say DEP2.

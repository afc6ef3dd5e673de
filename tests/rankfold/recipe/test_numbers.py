"""Nodes, parallel sizes, load and limits: each rule on a wrong recipe and on a near twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rankfold.recipe.recipes import GOOD, Edit, edited, lint_edits, lint_text, rules

COMMENTS = (
    "# 3P DEP2 prefill (TP1 DP2 EP, 2 GPU/worker) + 1D DEP16 decode (TP1 DP16 EP, "
    "16 GPU/worker = 4 nodes each).\n"
    "# A tray of GB300 has 4 GPUs. Nodes: 2 prefill + 4 decode.\n"
)
NO_COMMENTS = (COMMENTS, "")
"""So that only the rule at hand speaks."""


@pytest.mark.parametrize(
    ("edits", "found", "says"),
    [
        ([("decode_nodes: 4", "decode_nodes: 2")], ["nodes"], "needs 4 nodes of 4 GPUs"),
        ([("decode_nodes: 4", "decode_nodes: 5")], ["nodes"], "1 node stays idle"),
        ([("decode_nodes: 4", "decode_nodes: 7")], ["nodes"], "3 nodes stay idle"),
        ([("prefill_nodes: 2", "prefill_nodes: 1")], ["nodes"], "3 workers of 2 GPUs need 2"),
        ([("gpus_per_node: 4", "gpus_per_node: 8")], ["nodes", "nodes", "nodes"], "4 GPUs at most"),
        # Three workers of three GPUs cannot share nodes of four.
        (
            [("gpus_per_prefill: 2", "gpus_per_prefill: 3")],
            ["nodes", "parallel-size"],
            "3 workers of 3 GPUs need 3 nodes",
        ),
        # Without gpus_per_prefill srt-slurm divides the nodes' GPUs.
        ([("  gpus_per_prefill: 2\n", "")], ["nodes"], "8 GPUs do not divide by 3 workers"),
        # Shared nodes: sums count.
        (
            [("decode_nodes: 4", "decode_nodes: 0"), ("prefill_nodes: 2", "prefill_nodes: 5")],
            ["nodes"],
            "22 GPUs are needed on shared nodes, and 5 nodes have 20",
        ),
    ],
)
def test_nodes_that_do_not_add_up(
    tmp_path: Path, edits: list[Edit], found: list[str], says: str
) -> None:
    report = lint_edits(tmp_path, NO_COMMENTS, *edits, name="r.yaml")
    assert rules(report) == found
    assert any(says in finding.message for finding in report.findings), report.findings


@pytest.mark.parametrize(
    "edits",
    [
        [],
        # Four workers of two GPUs fill the same two nodes, as three leave two GPUs over.
        [("prefill_workers: 3", "prefill_workers: 4"), ("3p1d-dep2-dep16-fp8", "4p1d-dep2-dep16")],
        [("decode_nodes: 4", "decode_nodes: 0"), ("prefill_nodes: 2", "prefill_nodes: 6")],
        [("connector: null", "connector: null\n  allow_prefill_decode_colocation: true")],
        # A GPU that is not known may have any number on a node.
        [
            ('gpu_type: "gb300"', 'gpu_type: "x900"'),
            ("gpus_per_node: 4", "gpus_per_node: 2"),
            ("prefill_nodes: 2", "prefill_nodes: 3"),
            ("decode_nodes: 4", "decode_nodes: 8"),
        ],
        [
            ("gpus_per_node: 4", "gpus_per_node: 4\n  spread_workers: true"),
            ("prefill_nodes: 2", "prefill_nodes: 3"),
        ],
    ],
)
def test_nodes_that_add_up(tmp_path: Path, edits: list[Edit]) -> None:
    report = lint_edits(tmp_path, NO_COMMENTS, *edits, name="r.yaml")
    assert not report.findings, report.findings


@pytest.mark.parametrize(
    ("edits", "says", "suggestion"),
    [
        (
            [("data-parallel-size: 16", "data-parallel-size: 8")],
            "decode: DP8 makes 8 ranks a worker, and gpus_per_decode is 16",
            "write data-parallel-size: 16, or gpus_per_decode: 8",
        ),
        (
            [("      data-parallel-size: 2\n", "      data-parallel-size: 4\n")],
            "prefill: DP4 makes 4 ranks a worker, and gpus_per_prefill is 2",
            "write data-parallel-size: 2, or gpus_per_prefill: 4",
        ),
        (
            [("data-parallel-size: 16", "data-parallel-size: 16\n      pipeline-parallel-size: 2")],
            "decode: PP2 x DP16 makes 32 ranks a worker",
            "write data-parallel-size: 8, or gpus_per_decode: 32",
        ),
        (
            [("data-parallel-size: 16", "data_parallel_size: 8")],
            "decode: DP8 makes 8 ranks",
            "write data-parallel-size: 16, or gpus_per_decode: 8",
        ),
        (
            [
                (
                    "data-parallel-size: 16",
                    "data-parallel-size: 16\n      data-parallel-size-local: 17",
                )
            ],
            "17 local data-parallel ranks, of 16 in all",
            "write data-parallel-size-local: 16 or less",
        ),
    ],
)
def test_sizes_that_make_another_number_of_ranks(
    tmp_path: Path, edits: list[Edit], says: str, suggestion: str
) -> None:
    report = lint_edits(tmp_path, NO_COMMENTS, *edits, name="r.yaml")
    (finding,) = [one for one in report.findings if one.rule == "parallel-size"]
    assert says in finding.message
    assert finding.suggestion == suggestion


@pytest.mark.parametrize(
    "edits",
    [
        [
            (
                "data-parallel-size: 16",
                "data-parallel-size: 16\n      decode-context-parallel-size: 2",
            )
        ],
        [("data-parallel-size: 16", "data-parallel-size: 16\n      data-parallel-size-local: 4")],
        [
            (
                "data-parallel-size: 16",
                "data-parallel-size: 8\n      prefill-context-parallel-size: 2",
            )
        ],
        [("data-parallel-size: 16", "data-parallel-size: '16'")],
        [("data-parallel-size: 16", "data_parallel_size: 16")],
    ],
)
def test_sizes_that_fit(tmp_path: Path, edits: list[Edit]) -> None:
    name = ("3p1d-dep2-dep16-fp8", "fp8")  # A name is about TP, PP and DP alone.
    report = lint_edits(tmp_path, NO_COMMENTS, name, *edits, name="r.yaml")
    assert "parallel-size" not in rules(report)


def test_without_any_size_nothing_is_said_about_sizes(tmp_path: Path) -> None:
    """The launcher may set them."""
    text = edited(GOOD, [NO_COMMENTS]).replace("tensor-parallel-size: 1\n", "block-size: 128\n", 1)
    text = text.replace("      block-size: 128\n      data-parallel-size: 2\n", "", 1)
    assert "parallel-size" not in rules(lint_text(tmp_path, text))


def test_sections_without_workers_and_workers_without_a_section(tmp_path: Path) -> None:
    head, _, tail = GOOD.partition("\n    decode:\n")
    decode, _, rest = tail.partition("\nbenchmark:")
    missing = lint_text(tmp_path, f"{head}\n\nbenchmark:{rest}")
    assert "backend.vllm_config has no decode" in missing.findings[0].message
    assert decode
    extra = lint_edits(tmp_path, ("\n    decode:\n", "\n    aggregated: {}\n    decode:\n"))
    assert rules(extra) == ["parallel-size"]
    assert "there are no agg workers" in extra.findings[0].message


@pytest.mark.parametrize(
    ("edits", "rule", "says"),
    [
        ([('"512"', '"8192"')], "concurrency", "decode runs 4096: 1 worker x 16 data-parallel"),
        ([('"512"', '"512x4097"')], "concurrency", "4097 requests"),
        ([("max-num-seqs: 256", "max-num-seqs: 31")], "concurrency", "decode runs 496"),
        ([('"512"', '"512,1024"')], "concurrency", "'512,1024'"),
        ([('"512"', '"512x"')], "concurrency", "'512x'"),
        (
            [
                (
                    "      max-num-seqs: 256\n      max-num-batched-tokens: 16384",
                    LOW := ("      max-num-seqs: 256\n      max-num-batched-tokens: 255"),
                )
            ],
            "limits",
            "255 is less than max-num-seqs 256",
        ),
        ([("isl: 8192", "isl: 8500")], "limits", "less than the 9524 tokens of a request"),
    ],
)
def test_load_that_does_not_fit(tmp_path: Path, edits: list[Edit], rule: str, says: str) -> None:
    report = lint_edits(tmp_path, *edits)
    (finding,) = [one for one in report.findings if one.rule == rule]
    assert says in finding.message


@pytest.mark.parametrize(
    "edits",
    [
        [('"512"', '"512x4096"')],
        [('"512"', "[512, 1024]")],
        [('"512"', "512")],
        [("max-num-seqs: 256", "max-num-seqs: 32")],
        [("      max-num-seqs: 256\n", "")],
        [
            (
                "      max-num-seqs: 256\n      max-num-batched-tokens: 16384",
                LOW.replace("255", "256"),
            )
        ],
        [("isl: 8192", "isl: 8191")],
    ],
)
def test_load_that_fits(tmp_path: Path, edits: list[Edit]) -> None:
    report = lint_edits(tmp_path, *edits)
    assert not report.findings, report.findings

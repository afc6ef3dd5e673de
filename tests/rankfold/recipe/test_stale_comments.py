"""Comments: those that describe another topology are found, and all other prose is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfold.recipe.lint import lint
from tests.rankfold.recipe.recipes import (
    GOOD,
    MASTER,
    edited,
    lint_both,
    lint_edits,
    lint_pair,
    rules,
)

DESCRIPTION = (
    "# 3P DEP2 prefill (TP1 DP2 EP, 2 GPU/worker) + 1D DEP16 decode (TP1 DP16 EP, "
    "16 GPU/worker = 4 nodes each).\n"
    "# A tray of GB300 has 4 GPUs. Nodes: 2 prefill + 4 decode.\n"
)

STALE = {
    "3P DEP2 prefill + 2D DEP8 decode.": "3P DEP2 prefill + 1D DEP16 decode.",
    "3P DEP2 prefill + 1D DEP8 decode": "3P DEP2 prefill + 1D DEP16 decode",
    "1D DEP16 decode (TP1 DP8 EP, 4 nodes).": "1D DEP16 decode (TP1 DP16 EP, 4 nodes).",
    "1D DEP16 decode (8 GPUs per worker).": "1D DEP16 decode (16 GPUs per worker).",
    "4P DEP2 prefill (2 GPU/worker).": "3P DEP2 prefill (2 GPU/worker).",
    "Topology: 3 prefill (DEP=2 each) + 2 wide decode (DEP=8, 8 GPUs).": (
        "Topology: 3 prefill (DEP=2 each) + 1 wide decode (DEP16, 16 GPUs)."
    ),
    "Nodes: 2 prefill + 2 decode (+ head/infra).": "Nodes: 2 prefill + 4 decode (+ head/infra).",
    "8 nodes total.": "6 nodes total.",
    "GB300 has 8 GPUs/node.": "GB300 has 4 GPUs/node.",
    "3p2d DEP2+DEP8, conc 512": "3p1d DEP2+DEP16, conc 512",
    "3p2d-dep2-dep8": "3p1d-dep2-dep16",
    "3p1d DEP2+DEP16, conc 256": "3p1d DEP2+DEP16, conc 512",
    "decode: 2x DEP8": "decode: 1x DEP16",
    "two decode workers of 8 GPUs": "1 decode workers of 16 GPUs",
    "prefill is TP4, decode is DEP16": "prefill is TP1, decode is DEP16",
    "TP8 x PP2": "",
    "TEP16 decode": "DEP16 decode",
}
"""Comments above a recipe of 3p1d-dep2-dep16, and what is suggested, if one thing can be."""

SILENT = [
    # Right, in other words.
    "3P DEP2 prefill + 1D DEP16 decode.",
    "3p1d DEP2+DEP16, 6n: conc 512",
    "Topology: 3 prefill (DEP=2 each) + 1 wide decode (DEP=16, 16 GPUs).",
    "Decode (TP=16 / DP=16 / EP=16 / 4 nodes).",
    "7 nodes total.",
    "2 prefill nodes, 4 decode nodes",
    "3 prefill workers of 2 GPUs, 1 decode worker of 16 GPUs",
    "16 decode GPUs over 4 nodes",
    "22 GPUs",
    "B300 has 8 GPUs/node.",
    # History.
    "Was 2D DEP8 decode until July.",
    "Before: 3P DEP2 prefill + 2D DEP8 decode.",
    "2D DEP8 decode -> 1D DEP16 decode",
    "2D DEP8 decode \N{RIGHTWARDS ARROW} 1D DEP16 decode",
    "Collapsed from 2x DEP8 decode.",
    "The two DEP8 workers became one DEP16.",
    "2D DEP8 / 1D DEP16",
    "2026-07-01: 2D DEP8 decode.",
    "The earlier DP32 aggregated attempt collapsed onto a single node.",
    "Changelog:\n# 2D DEP8 decode (TP1 DP8 EP)",
    "What we ran before this:\n#\n#   3P DEP2 prefill + 2D DEP8 decode.",
    "Old layout:\n\n# 3P DEP2 prefill + 2D DEP8 decode.",
    "2D DEP8 decode. That was the layout in June.",
    "An older recipe had more workers. 2D DEP8 decode.",
    # Contrast and choice.
    "Wider-EP arm; all other settings match the two-DEP8 control.",
    "TP8 (not TP16) keeps the FP8 blocks whole.",
    "Faster than 2D DEP8 decode.",
    "Use 2D DEP8 decode for c256.",
    "Try 2D DEP8 decode?  TODO",
    "DEP8 decode would need 2 workers.",
    "DEP4, DEP8, TEP4",
    "Decode: TEP8, DEP8, TEP4.",
    "a smaller world, e.g. 2D DEP8 decode.",
    # References.
    "Mirrored from recipes/vllm/8k1k/disagg-gb200-3p2d-dep8-dep8-c2048.yaml",
    "Same flags as 3p2d-dep2-dep8.",
    "Adapted from the 1P DEP8 + 2D DEP8 recipe of B300.",
    "See PR 1863 (2D DEP8 decode).",
    # Configuration that is commented out.
    "decode_workers: 2",
    "data-parallel-size: 8",
    "  num-worker: 2",
    "name: minimax-m3-vllm-disagg-gb300-3p2d-dep2-dep8-fp8-8k1k",
    'additional-settings: ["CONFIG_FILE=recipes/3p2d-dep2-dep8-8k1k.yaml"]',
    # Other things altogether.
    "2 retries, 8 seconds",
    "8 kB pages",
    "CUDA 13, NCCL 2.29, 8 channels",
    "8xH100 has 640 GB",
    "MTP2 point",
    "",
    "....",
    "2",
]


@pytest.mark.parametrize(("comment", "right"), STALE.items())
def test_a_stale_description_is_found(tmp_path: Path, comment: str, right: str) -> None:
    report = lint_edits(tmp_path, (DESCRIPTION, f"# {comment}\n"))
    (finding,) = report.findings
    assert finding.rule == "stale-comment"
    assert finding.line == 3
    if right:
        assert finding.suggestion == f"# {right}"
        assert lint_edits(tmp_path, (DESCRIPTION, f"# {right}\n")).ok


@pytest.mark.parametrize("comment", SILENT)
def test_other_prose_is_left_alone(tmp_path: Path, comment: str) -> None:
    report = lint_edits(tmp_path, (DESCRIPTION, f"# {comment}\n"))
    assert not report.findings, report.findings


@pytest.mark.parametrize(
    ("line", "comment", "stale"),
    [
        ("  decode_workers: 1\n", "one DEP16 worker", False),
        ("  decode_workers: 1\n", "2 DEP8 workers", False),  # Not a form that is known: left alone.
        ("  decode_workers: 1\n", "2x DEP8", True),
        ("  decode_workers: 1\n", "was 2x DEP8", False),
        ("  gpus_per_decode: 16\n", "2 nodes each", True),
        ("  gpus_per_decode: 16\n", "4 nodes each", False),
        ("  prefill_nodes: 2\n", "4 GPUs each", False),
        ("  prefill_nodes: 2\n", "8 GPUs each", True),
        ("      data-parallel-size: 16\n", "DEP8", True),
        ("      data-parallel-size: 16\n", "DP16+EP", False),
        ("      data-parallel-size: 2\n", "DEP16", True),
        ("      data-parallel-size: 2\n", "DEP2", False),
    ],
)
def test_a_comment_at_a_line_is_about_the_side_of_the_line(
    tmp_path: Path, line: str, comment: str, stale: bool
) -> None:
    report = lint_edits(tmp_path, (line, f"{line.rstrip()}  # {comment}\n"))
    assert rules(report) == (["stale-comment"] if stale else [])
    if stale:
        text = (tmp_path / "3p1d-dep2-dep16-8k1k.yaml").read_text().splitlines()
        assert text[report.findings[0].line - 1].startswith(line.rstrip())


def test_a_comment_above_a_section_is_about_that_section(tmp_path: Path) -> None:
    above = ("    decode:\n      tensor", "    # DEP2\n    decode:\n      tensor")
    assert rules(lint_edits(tmp_path, above)) == ["stale-comment"]
    right = ("    decode:\n      tensor", "    # DEP16\n    decode:\n      tensor")
    assert lint_edits(tmp_path, right).ok


def test_text_in_quotes_and_blocks_is_no_comment(tmp_path: Path) -> None:
    edits = (
        ('  path: "minimax-m3-mxfp8"', '  path: "minimax # 2D DEP8 decode."'),
        ("benchmark:\n", "output:\n  log_dir: |\n    # 2D DEP8 decode.\nbenchmark:\n"),
    )
    assert lint_edits(tmp_path, *edits).ok


def test_the_line_is_that_of_the_wrong_word_also_in_a_sentence_over_lines(tmp_path: Path) -> None:
    comment = "# 3P DEP2 prefill (TP1 DP2 EP)\n# + 2D DEP8 decode.\n"
    (finding,) = lint_edits(tmp_path, (DESCRIPTION, comment)).findings
    assert (finding.line, finding.column) == (4, 5)


@pytest.mark.parametrize(
    ("comment", "stale"),
    [
        ("# 3p1d DEP2+DEP16, 6n: conc 512", False),
        ("# 3p2d DEP2+DEP8, 6n: conc 512", True),
        ("# 3p1d DEP2+DEP16, 9n: conc 512", True),
        ("# 3p1d DEP2+DEP16: conc 1024", True),
        ("# Formerly 3p2d DEP2+DEP8.", False),
    ],
)
def test_a_comment_above_a_point_is_about_the_point(
    tmp_path: Path, comment: str, stale: bool
) -> None:
    report = lint_both(tmp_path, master=[("# 3p1d DEP2+DEP16, 6n: conc 512", comment)])
    assert rules(report) == (["stale-comment"] if stale else [])


def test_a_comment_above_an_entry_may_be_about_all_its_points(tmp_path: Path) -> None:
    text = "# Prefill DEP4 (TP1 DP4 EP, 4 GPU/worker). Decode: TEP8.\n" + MASTER
    assert lint_pair(tmp_path, GOOD, text).ok


def test_a_recipe_of_another_engine_is_judged_by_its_resources_only(tmp_path: Path) -> None:
    """SGLang's flags are not read, so its degrees are not known; workers and nodes are."""
    text = edited(GOOD, [("type: vllm", "type: sglang"), ("  vllm_config:", "  sglang_config:")])
    stale = edited(text, [(DESCRIPTION, "# Topology: 7 prefill (TP=4 / DP=4 / EP=4).\n")])
    right = edited(text, [(DESCRIPTION, "# Topology: 3 prefill (TP=4 / DP=4 / EP=4).\n")])
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, source in ((one, stale), (other, right)):
        folder.mkdir()
        (folder / "r.yaml").write_text(source)
    assert "stale-comment" in rules(lint([str(one / "r.yaml")]))
    assert "stale-comment" not in rules(lint([str(other / "r.yaml")]))


WORDS = st.sampled_from(
    ["3P", "1D", "2D", "DEP2", "DEP8", "DEP16", "TP1", "DP16", "EP", "TEP8", "PP2", "prefill",
     "decode", "(", ")", "+", ",", ":", ".", "=", "/", "x", "4 nodes", "2 nodes each", "16 GPUs",
     "8 GPU/worker", "4 GPUs/node", "3p2d", "conc 512", "conc 1,2x4", "two", "workers", "GB300",
     "is", "and", "6n", "-", "e.g.", "0", "99999", "dep0", "DEP99999"]
)  # fmt: skip
SENTENCES = st.lists(WORDS, max_size=14).map(" ".join)


@given(sentence=SENTENCES)
def test_any_description_is_right_or_told_and_told_of_the_past_is_left_alone(
    tmp_path_factory: pytest.TempPathFactory, sentence: str
) -> None:
    """Nothing but a stale comment comes of a comment, on its line, and it has no suggestion that
    would be stale itself; after "before the change," the same words are never told."""
    folder = tmp_path_factory.mktemp("any")
    for finding in lint_edits(folder, (DESCRIPTION, f"# {sentence}\n")).findings:
        assert (finding.rule, finding.line) == ("stale-comment", 3)
        if finding.suggestion.startswith("# "):
            again = lint_edits(folder, (DESCRIPTION, f"{finding.suggestion}\n")).findings
            assert not again, (finding.suggestion, again)
    past = f"# Before the change, {sentence.replace('.', ',')}\n"
    assert lint_edits(folder, (DESCRIPTION, past)).ok

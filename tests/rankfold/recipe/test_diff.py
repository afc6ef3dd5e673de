"""Two recipes in words: what changed, what stayed; every changed field is in the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankfold.cli import main
from rankfold.recipe.diff import compare, lines
from rankfold.recipe.loader import parse
from tests.rankfold.recipe.recipes import BELOW, EXAMPLES, GOOD, MASTER, NAME, OLD_NAME, edited

OLD = str(EXAMPLES / "before/recipes" / BELOW / OLD_NAME)
NEW = str(EXAMPLES / "corrected/recipes" / BELOW / NAME)

IMAGE = "vllm/vllm-openai:nightly"


def said(before: str, after: str) -> list[str]:
    """The lines about two texts, without the first, which has the files."""
    a, b = parse("a.yaml", before), parse("b.yaml", after)
    return list(lines(a, b, compare(a, b)))[1:]


def test_the_change_of_seed_2_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "diff", OLD, NEW]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{OLD} -> {NEW}",
        "decode: two workers of 8 GPUs (dep8) become one of 16 (dep16)",
        "name: minimax-m3-vllm-disagg-gb300-3p2d-dep2-dep8-fp8-8k1k becomes "
        "minimax-m3-vllm-disagg-gb300-3p1d-dep2-dep16-fp8-8k1k (line 1)",
        f"model.container: {IMAGE}-0123456789abcdef0123456789abcdef01234567 becomes "
        f"{IMAGE}-89abcdef0123456789abcdef0123456789abcdef (line 8)",
        "dynamo.version: 1.3.0.dev20260614 becomes 1.3.0.dev20260710 (line 13)",
        "setup_script: minimax-m3-vllm-fixes.sh is removed",
        "stays  prefill: three workers of 2 GPUs (dep2) on 2 nodes",
        "stays  decode: 16 GPUs in all on 4 nodes",
        "stays  load: 8192 tokens in, 1024 out, concurrency 512",
        "stays  51 fields of 58 are the same",
    ]


def test_json_has_every_changed_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "diff", OLD, NEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"same", "words", "changes", "stayed"}
    assert found["same"] is False
    by_path = {change["path"]: change for change in found["changes"]}
    assert set(by_path) == {
        "name",
        "model.container",
        "dynamo.version",
        "setup_script",
        "resources.decode_workers",
        "resources.gpus_per_decode",
        "backend.vllm_config.decode.data-parallel-size",
    }
    assert by_path["resources.gpus_per_decode"] == {
        "path": "resources.gpus_per_decode",
        "before": 8,
        "after": 16,
        "line_before": 31,
        "line_after": 27,
    }
    assert by_path["setup_script"]["after"] is None


def test_a_recipe_and_itself() -> None:
    assert said(GOOD, GOOD)[0] == "no field differs"


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([("decode_nodes: 4", "decode_nodes: 5")], ["decode: 4 nodes become 5"]),
        (
            [("prefill_workers: 3", "prefill_workers: 4")],
            [
                "prefill: three workers of 2 GPUs (dep2) become four of 2 (dep2)",
                "prefill: 6 GPUs in all become 8",
            ],
        ),
        (
            [("max-num-seqs: 256\n", "max-num-seqs: 128\n")],
            ["backend.vllm_config.decode.max-num-seqs: 256 becomes 128 (line 71)"],
        ),
        (
            [("  install: true\n", "  install: false\n")],
            ["dynamo.install: true becomes false (line 12)"],
        ),
        (
            [("connector: null", "connector: nixl")],
            ["backend.connector: null becomes nixl (line 35)"],
        ),
        (
            [("gpus_per_node: 4", "gpus_per_node: '4'")],
            ['resources.gpus_per_node: 4 becomes "4" (line 21)'],
        ),
    ],
)
def test_single_changes(edits: list[tuple[str, str]], says: list[str]) -> None:
    changed = [line for line in said(GOOD, edited(GOOD, edits)) if not line.startswith("stays")]
    assert changed == says


def test_a_side_that_is_new_or_gone() -> None:
    text = edited(
        GOOD,
        [
            ("  decode_nodes: 4\n", ""),
            ("  decode_workers: 1\n", ""),
            ("  gpus_per_decode: 16\n", ""),
        ],
    )
    assert "decode: one worker of 16 GPUs (dep16) is removed" in said(GOOD, text)
    assert "decode: one worker of 16 GPUs (dep16) is new" in said(text, GOOD)


def test_comments_and_order_do_not_matter() -> None:
    lines_of = GOOD.splitlines()
    reordered = "\n".join(
        [*lines_of[lines_of.index("benchmark:") :], *lines_of[: lines_of.index("benchmark:")]]
    )
    assert said(GOOD, f"# Another comment.\n{reordered}\n")[0] == "no field differs"


def test_two_master_configurations_are_compared_by_field() -> None:
    other = edited(MASTER, [("num-worker: 1", "num-worker: 2")])
    (change,) = [line for line in said(MASTER, other) if not line.startswith("stays")]
    assert change.startswith("minimaxm3-fp8-gb300-dynamo-vllm.scenarios.fixed-seq-len[0]")
    assert "decode.num-worker: 1 becomes 2 (line" in change


def test_a_recipe_and_a_master_configuration_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(MASTER)
    assert main(["recipe", "diff", NEW, str(tmp_path / "m.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a recipe, and" in line

"""Keys, types, flags and words: what is misspelt or of a wrong type, and what is only new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rankfold.recipe.recipes import (
    GOOD,
    MASTER,
    Edit,
    lint_both,
    lint_edits,
    lint_text,
    rules,
)


@pytest.mark.parametrize(
    ("edit", "rule", "says", "suggestion"),
    [
        (("decode_workers: 1", "decode_worker: 1"), "unknown-key", "resources has no key",
         "write decode_workers"),
        (("health_check:", "healthcheck:"), "unknown-key", "a recipe has no key",
         "write health_check"),
        (("req_rate:", "rate_of_requests:"), "unknown-key", "benchmark has no key",
         "remove it; there are"),
        (("gpus_per_node: 4", "gpus_per_node: '4'"), "wrong-type", "the text '4'",
         "write 4 without quotes"),
        (("gpus_per_node: 4", "gpus_per_node: 0"), "wrong-type", "is 0", "write 1 or more"),
        (("gpus_per_node: 4", "gpus_per_node: four"), "wrong-type", "the text 'four'",
         "write a whole number"),
        (("gpus_per_node: 4", "gpus_per_node: 4.0"), "wrong-type", "is 4.0",
         "write a whole number"),
        (("gpus_per_node: 4", f"gpus_per_node: {'9' * 30}"), "wrong-type", "more than 12 digits",
         "write 100000 or less"),
        (("install: true", "install: 'yes'"), "wrong-type", "the text 'yes'",
         "write true or false"),
        (('version: "1.3.0.dev20260710"', "version: 1.3"), "wrong-type", "is 1.3",
         'write "1.3", in quotes'),
        (('precision: "fp8"', 'precision: "fp9"'), "unknown-value", "nearly fp", "write "),
        (("type: vllm", "type: vlm"), "unknown-value", "nearly vllm", "write vllm"),
        (("type: dynamo", "type: dynamos"), "unknown-value", "nearly dynamo", "write dynamo"),
        (('req_rate: "inf"', 'req_rate: "in"'), "unknown-value", "nearly inf", "write inf"),
        (("max-num-seqs: 256", "max-num-seq: 256"), "unknown-flag", "--max-num-seq",
         "write max-num-seqs"),
        (("max-num-seqs: 256", "max-num-seqs: 0"), "flag-value", "'0'", "1 or more"),
        (("max-num-seqs: 256", "max-num-seqs: many"), "flag-value", "'many'", "1 or more"),
        (("max-num-seqs: 256", "max-num-seqs: 256\n      max_num_seqs: 128"), "flag-value",
         "another spelling", "keep one"),
    ],
)  # fmt: skip
def test_what_is_misspelt_or_of_a_wrong_type(
    tmp_path: Path, edit: Edit, rule: str, says: str, suggestion: str
) -> None:
    report = lint_edits(tmp_path, edit)
    finding = next(one for one in report.findings if one.rule == rule)
    assert says in finding.message
    assert suggestion in finding.suggestion


@pytest.mark.parametrize(
    "edit",
    [
        # Flags of another version, of Dynamo, and in the other spelling.
        ("max-num-seqs: 256", "max-num-seqs: 256\n      some-future-flag: true"),
        ("max-num-seqs: 256", "max-num-seqs: 256\n      cudagraph_mode: FULL_DECODE_ONLY"),
        ("max-num-seqs: 256", "max-num-seqs: 256\n      dyn-tool-call-parser: minimax_m3"),
        ("max-num-seqs: 256", "max-num-seqs: 256\n      dyn-reasoning-parser: minimax_m3"),
        ("max-num-seqs: 256", "max-num-seqs: 256\n      no-disable-hybrid-kv-cache-manager: true"),
        ("max-num-seqs: 256", "max-num-seqs: 256\n      enable-log-outputs: true"),
        ("max-num-seqs: 256", "max_num_seqs: 256"),
        # Words that are new and near to none.
        ('type: "sa-bench"', 'type: "house-bench-of-ours"'),
        ("type: dynamo", "type: wattle"),
        # Keys of srt-slurm that recipes seldom have.
        ("health_check:\n", "health_check:\n  fatal_log_markers: false\n"),
        ("install: true", "install: true\n  request_plane: nats"),
        ("connector: null", "connector: null\n  dp_launch_mode: per_node"),
        # Merged environments.
        ("connector: null", "connector: null\n  aggregated_environment: &e {A: '1'}"),
    ],
)
def test_what_is_only_new_is_left_alone(tmp_path: Path, edit: Edit) -> None:
    report = lint_edits(tmp_path, edit)
    assert not report.findings, report.findings


@pytest.mark.parametrize("switch", ["enable-expert-parallel", "trust-remote-code"])
def test_a_switch_is_true_or_false(tmp_path: Path, switch: str) -> None:
    text = GOOD.replace(f"{switch}: true", f"{switch}: 'maybe'")
    assert rules(lint_text(tmp_path, text)).count("flag-value") == 2  # On either side.


def test_json_flags_are_json(tmp_path: Path) -> None:
    seqs = "      max-num-seqs: 256\n"
    wrong = lint_edits(tmp_path, (seqs, seqs + "      compilation-config: '{\"mode\": 0'\n"))
    assert rules(wrong) == ["flag-value"]
    for good in ("'{\"mode\": 0}'", "{mode: 0}", "3"):
        assert lint_edits(tmp_path, (seqs, f"{seqs}      compilation-config: {good}\n")).ok


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            ('name: "minimax-m3-vllm-disagg-gb300-3p1d-dep2-dep16-fp8-8k1k"\n', ""),
            "name is missing",
        ),
        (('  precision: "fp8"\n', ""), "model.precision is missing"),
        (("  decode_workers: 1\n", ""), "resources.decode_workers is missing"),
        (("  type: vllm\n", ""), "backend.type is missing"),
        (("  decode_nodes: 4\n", ""), "resources.decode_nodes is missing"),
    ],
)
def test_keys_that_have_to_be_there(tmp_path: Path, edit: Edit, says: str) -> None:
    report = lint_edits(tmp_path, edit)
    assert any(f.rule == "missing-key" and says in f.message for f in report.findings)


def test_a_recipe_of_the_default_engine_need_not_name_it(tmp_path: Path) -> None:
    head, _, tail = GOOD.partition("backend:\n")
    text = f"{head}benchmark:{tail.partition('benchmark:')[2]}"
    assert lint_text(tmp_path, text).ok


def test_one_wrong_type_does_not_make_other_findings(tmp_path: Path) -> None:
    """A side whose workers cannot be read is not judged by its arithmetic as well."""
    report = lint_edits(tmp_path, ("decode_workers: 1", "decode_workers: one"))
    assert "wrong-type" in rules(report)
    assert "nodes" not in rules(report)
    assert "name" not in rules(report)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("num-worker: 1", "num-workers: 1", "unknown-key"),
        ("conc-list: [512]", "conc-lists: [512]", "unknown-key"),
        ("  framework: dynamo-vllm", "  framwork: dynamo-vllm", "unknown-key"),
        ("tp: 16", "tp: sixteen", "wrong-type"),
        ("num-worker: 1", "num-worker: -1", "wrong-type"),
        ("  image: vllm/vllm-openai:nightly-89abcdef0123456789abcdef0123456789abcdef\n", "",
         "missing-key"),
    ],
)  # fmt: skip
def test_an_entry_with_a_wrong_word(tmp_path: Path, old: str, new: str, rule: str) -> None:
    assert rule in rules(lint_both(tmp_path, master=[(old, new)]))


def test_an_entry_may_have_keys_of_its_launcher(tmp_path: Path) -> None:
    edits = [("  multinode: true", "  multinode: true\n  house-option: 3")]
    assert lint_both(tmp_path, master=edits).ok
    assert "house-option" not in MASTER

"""Entries against recipes, versions, hand-over and scripts: what disagrees, and near twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankfold.recipe.lint import lint
from rankfold.recipe.rules.setup import patching_line
from tests.rankfold.recipe.recipes import (
    GOOD,
    MASTER,
    Edit,
    edited,
    lint_both,
    lint_edits,
    lint_pair,
    rules,
)

DEP16 = "          tp: 16\n          ep: 16\n          dp-attn: true"
CONFIG_FILE = "8k1k/3p1d-dep2-dep16-8k1k.yaml"


@pytest.mark.parametrize(
    ("master", "says"),
    [
        (("num-worker: 1", "num-worker: 2"), "decode num-worker is 2"),
        ((DEP16, DEP16.replace("16", "8")), "decode is dep8"),
        ((DEP16, DEP16.replace("true", "false")), "decode is tep16"),
        ((DEP16, DEP16.replace("ep: 16", "ep: 8")), "which contradict"),
        (("isl: 8192", "isl: 1024"), "isl is 1024"),
        (("conc-list: [512]", "conc-list: [512, 1024]"), "conc-list is 512, 1024"),
        (("precision: fp8", "precision: fp4"), "precision is fp4"),
        (("runner: gb300-nv", "runner: gb200-nv"), "runner is gb200-nv"),
        (("framework: dynamo-vllm", "framework: dynamo-trt"), "framework is dynamo-trt"),
        (("minimaxm3-fp8-gb300", "minimaxm3-fp4-gb300"), "the key says fp4"),
        (("minimaxm3-fp8-gb300", "minimaxm3-fp8-gb200"), "the key says gb200"),
    ],
)
def test_an_entry_that_disagrees(tmp_path: Path, master: Edit, says: str) -> None:
    report = lint_both(tmp_path, master=[master])
    messages = [one.message for one in report.findings if one.rule == "entry"]
    assert any(says in message for message in messages), report.findings


@pytest.mark.parametrize(
    "master",
    [
        (DEP16, DEP16.replace("tp: 16", "tp: 1")),  # As older entries write DEP16.
        ("precision: fp8", "precision: mxfp8"),
        ("runner: gb300-nv", "runner: cluster:b-pool"),
        ("minimaxm3-fp8-gb300-dynamo-vllm:", "tune-of-tuesday:"),
        ("          dp-attn: true\n        decode", "          dp-attn: true\n\n        decode"),
    ],
)
def test_an_entry_that_agrees_in_other_words(tmp_path: Path, master: Edit) -> None:
    if "decode" in master[0]:
        master = ("        decode:", "\n        decode:")
    report = lint_both(tmp_path, master=[master])
    assert not report.findings, report.findings


def test_an_entry_may_run_some_of_the_points_of_its_recipe(tmp_path: Path) -> None:
    assert lint_both(tmp_path, recipe=[('"512"', '"256x512"')]).ok


def test_a_config_file_that_does_not_exist_or_was_renamed(tmp_path: Path) -> None:
    old = [(CONFIG_FILE, "8k1k/3p2d-dep2-dep8-8k1k.yaml")]
    (finding,) = lint_both(tmp_path, master=old).findings
    assert finding.rule == "config-file"
    assert "3p2d-dep2-dep8-8k1k.yaml does not exist" in finding.message
    assert finding.suggestion == f"write CONFIG_FILE=recipes/minimax-m3/gb300-fp8/{CONFIG_FILE}"


@pytest.mark.parametrize(
    "config_file",
    ["other-model/8k1k/x.yaml", "../../x.yaml", "/etc/hosts/x.yaml", "$HOME/x.yaml", "x.yaml"],
)
def test_a_config_file_of_another_place_is_not_judged(tmp_path: Path, config_file: str) -> None:
    """What lies in another repository is told as not judged, which is no finding."""
    text = edited(MASTER, [("minimax-m3/gb300-fp8/8k1k/3p1d-dep2-dep16-8k1k.yaml", config_file)])
    path = tmp_path / "master.yaml"
    path.write_text(text)
    report = lint([str(path)])
    assert report.ok, report.findings
    (note,) = report.notes
    assert "was not compared" in note.message


def test_with_the_recipes_folder_given_every_config_file_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "master.yaml").write_text(MASTER)
    paths = [str(tmp_path / "master.yaml")]
    assert lint(paths).ok
    report = lint(paths, recipes=tmp_path / "elsewhere")
    assert rules(report) == ["config-file"]


def test_a_named_recipe_that_cannot_be_read_is_a_finding_of_the_entry(tmp_path: Path) -> None:
    folder = tmp_path / "recipes/minimax-m3/gb300-fp8/8k1k"
    folder.mkdir(parents=True)
    (folder / "3p1d-dep2-dep16-8k1k.yaml").write_text("a: [")
    (tmp_path / "master.yaml").write_text(MASTER)
    (finding,) = lint([str(tmp_path / "master.yaml")]).findings
    assert finding.rule == "config-file"
    assert "cannot be read" in finding.message


IDENTITY = """
identity:
  container:
    image: "vllm/vllm-openai:nightly-89abcdef0123456789abcdef0123456789abcdef"
  frameworks:
    dynamo: "1.3.0.dev20260710"
    vllm: "0.33.1rc1.dev255+g89abcdef0"
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("dev20260710", "dev20260614", "identity has Dynamo 1.3.0.dev20260614"),
        ("nightly-89", "nightly-79", "identity has the image"),
        ("g89abcdef0", "g79abcdef0", "identity has vLLM"),
    ],
)
def test_an_identity_that_disagrees(tmp_path: Path, old: str, new: str, says: str) -> None:
    identity = edited(IDENTITY, [(old, new)])
    (finding,) = lint_edits(tmp_path, ("\nbenchmark:", f"{identity}\nbenchmark:")).findings
    assert finding.rule == "version"
    assert says in finding.message


def test_an_identity_that_agrees(tmp_path: Path) -> None:
    assert lint_edits(tmp_path, ("\nbenchmark:", f"{IDENTITY}\nbenchmark:")).ok
    release = edited(IDENTITY, [("0.33.1rc1.dev255+g89abcdef0", "0.33.0")]).replace(
        "nightly-89abcdef0123456789abcdef0123456789abcdef", "v0.33.0-cu130"
    )
    image = ("nightly-89abcdef0123456789abcdef0123456789abcdef", "v0.33.0-cu130")
    assert lint_edits(tmp_path, image, ("\nbenchmark:", f"{release}\nbenchmark:")).ok


@pytest.mark.parametrize(
    ("recipe", "master", "found"),
    [
        ([], [('"1.3.0.dev20260710"', '"1.3.0.dev20260614"')], ["version"]),
        ([('"1.3.0.dev20260710"', '"1.4.0"')], [], ["version"]),
        ([], [("nightly-89", "nightly-79")], ["version"]),
        # The router is another program, the version is not written, or the image is an alias.
        ([], [("dynamo-router, version: \"1.3.0", "vllm-router, version: \"0.1.0")], []),
        ([], [(', version: "1.3.0.dev20260710"', "")], []),
        ([('container: "vllm/vllm-openai:nightly-89abcdef0123456789abcdef0123456789abcdef"',
           'container: "vllm-nightly"')], [], []),
        ([('version: "1.3.0.dev20260710"', "hash: 0123abc")], [], []),
        ([('version: "1.3.0.dev20260710"', 'wheel: "1.3.0.dev20260710"')], [], []),
        ([("vllm/vllm-openai:nightly", "vllm#vllm-openai:nightly")], [], []),
    ],
)  # fmt: skip
def test_versions_of_entry_and_recipe(
    tmp_path: Path, recipe: list[Edit], master: list[Edit], found: list[str]
) -> None:
    assert rules(lint_both(tmp_path, recipe, master)) == found


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fp8", "auto", "kv-cache-dtype is fp8 for prefill and auto for decode"),
        ("NixlConnector", "LMCacheConnectorV1", "decode has LMCacheConnectorV1"),
    ],
)
def test_sides_that_cannot_hand_over(tmp_path: Path, old: str, new: str, says: str) -> None:
    head, decode, tail = GOOD.partition("\n    decode:\n")
    key = "kv-cache-dtype: " if old == "fp8" else '"kv_connector": "'
    text = head + decode + tail.replace(key + old, key + new, 1)
    assert text != GOOD
    report = lint_pair(tmp_path, text, MASTER)
    (finding,) = report.findings
    assert finding.rule == "handover"
    assert says in finding.message


def test_sides_that_can_hand_over_in_other_words(tmp_path: Path) -> None:
    multi = (
        '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":'
        '[{"kv_connector":"NixlConnector"},{"kv_connector":"MooncakeStoreConnector"}]}}'
    )
    head, decode, tail = GOOD.partition("\n    decode:\n")
    old = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    text = head + decode + tail.replace(old, multi).replace("dtype: fp8", "dtype: fp8_e4m3")
    assert lint_pair(tmp_path, text, MASTER).ok


SCRIPT = ("\nhealth_check:", '\nsetup_script: "{}"\nhealth_check:')


def with_script(tmp_path: Path, name: str, content: str | None) -> list[str]:
    """The rules and notes for a recipe with a script, which is there if it has a content."""
    if content is not None:
        (tmp_path / "configs").mkdir(exist_ok=True)
        (tmp_path / "configs" / name).write_text(content)
    report = lint_edits(tmp_path, (SCRIPT[0], SCRIPT[1].format(name)))
    return rules(report) + [note.message for note in report.notes]


PATCH = "sed -i 's/a/b/' /usr/lib/python3/dist-packages/vllm/attention.py\n"


def test_a_script_that_was_removed(tmp_path: Path) -> None:
    with_script(tmp_path, "other.sh", "true\n")  # So there is a folder of scripts.
    assert with_script(tmp_path, "minimax-m3-vllm-fixes.sh", None) == ["setup-script"]


def test_a_script_that_patches_the_engine(tmp_path: Path) -> None:
    assert with_script(tmp_path, "deps.sh", PATCH) == ["engine-patch"]


@pytest.mark.parametrize(
    "content",
    [
        "pip install nixl\n",
        "# sed -i 's/a/b/' site-packages/vllm/x.py\npip install x\n",
        "sed -i 's/a/b/' /etc/hosts\n",
        "python3 -c 'import vllm; print(vllm.__file__)'\n",
        "",
    ],
)
def test_a_script_that_only_installs(tmp_path: Path, content: str) -> None:
    assert with_script(tmp_path, "vllm-fixes.sh", content) == []


def test_a_script_that_is_out_of_reach(tmp_path: Path) -> None:
    assert with_script(tmp_path, "vllm-container-deps.sh", None) == []
    assert with_script(tmp_path, "minimax-m3-vllm-fixes.sh", None) == ["engine-patch"]
    (note,) = with_script(tmp_path, "house-deps.sh", None)
    assert "was not judged" in note


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (PATCH, 1),
        ("set -e\ncd site-packages/vllm\npatch -p1 < fix.diff\n", 3),
        ("p=site-packages/flashinfer/x.py\npython3 - <<'P'\nopen(p, 'w').write(s)\nP\n", 3),
        ("cp x.py /usr/lib/python3/site-packages/vllm/x.py\n", 1),
        ("cp x.py /opt/x.py\n", None),
    ],
)
def test_which_line_of_a_script_patches(script: str, line: int | None) -> None:
    assert patching_line(script) == line


def test_mounts_over_the_engine(tmp_path: Path) -> None:
    over = '\nextra_mount: ["/x/y.py:/usr/lib/python3/dist-packages/vllm/y.py"]\nhealth_check:'
    assert rules(lint_edits(tmp_path, ("\nhealth_check:", over))) == ["engine-patch"]
    data = '\nextra_mount: ["/x/vllm:/data"]\ncontainer_mounts: {"/a": "/b"}\nhealth_check:'
    assert lint_edits(tmp_path, ("\nhealth_check:", data)).ok

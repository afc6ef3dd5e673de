"""Malformed, hostile and huge input: one line with the place, exit code 2, no traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankfold.cli import main
from rankfold.recipe import loader
from rankfold.recipe.diff import compare
from rankfold.recipe.diff import lines as diff_lines
from rankfold.recipe.lint import kind_of, lint
from rankfold.recipe.loader import MAX_BYTES, parse, read
from rankfold.recipe.report import lines, to_json
from rankfold.recipe.sarif import to_sarif
from rankfold.recipe.source import BadRecipe
from tests.rankfold.recipe.recipes import GOOD, MASTER

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)

BAD = {
    "empty": ("", ":1: is empty"),
    "only a comment": ("# nothing\n", ":1: is empty"),
    "a list": ("- 1\n", ":1: is no mapping"),
    "text": ("hello\n", ":1: is no mapping"),
    "two documents": ("a: 1\n---\nb: 1\n", ":2: "),
    "open bracket": ("a: 1\nb: [\n", ":3: "),
    "tab": ("a:\n\t- b\n", ":2: "),
    "control character": ("a: 1\nb: \x07\n", ":2: has a control character"),
    "duplicate key": (GOOD.replace("dynamo:", "resources:"), "resources is there twice"),
    "duplicate key below": (
        "a:\n  b: 1\n  b: 2\n",
        ":3: the key b is there twice, first in line 2",
    ),
    "tag": ("a: !!python/object/apply:os.system [ls]\n", ":1: the tag"),
    "own tag": ("a: 1\nb: !x 2\n", ":2: the tag !x"),
    "million laughs": (LAUGHS, "aliases repeat values"),
    "own ancestor": ("a: &a\n  b: *a\n", "an alias refers to what it is in"),
    "unknown alias": ("a: *b\n", ":1: "),
    "deep flow": ("a: " + "[" * 20_000, ":1: nesting deeper than 32"),
    "deep blocks": ("\n".join(" " * n + "a:" for n in range(200)), "nesting deeper than 32"),
    "key that is a list": ("? [a]\n: 1\n", ":1: a key is text"),
    "many aliases": ("a: &a 1\nb: [" + "*a," * 300 + "]", "more than 256 aliases"),
    "no number": ("a: 0b_\n", ":1: 0b_ is no number"),
    "endless number": ("a: " + "9" * 5000 + "\n", ":1: 9999"),
    "another YAML": ("%YAML 3.0\n---\na: 1\n", ":1: "),
    "merged list": ("a:\n  <<: [1, 2]\n", "merges mappings only"),
    "neither": ("a: 1\n", "is neither a recipe"),
    "layout 2": ("schema: 2\nresources: {}\n", "is written in layout 2"),
    "roles": ("resources: {}\nroles: {}\n", "is written in layout 2"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=list(BAD))
def test_malformed_and_hostile_text(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert main(["recipe", "lint", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"rankfold recipe lint: {path}:")
    assert says in line
    assert len(line) < 400


def test_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_VALUES", 400)
    with pytest.raises(BadRecipe, match=r"r\.yaml:2: more than 400 values"):
        parse("r.yaml", "a: 1\nb: [" + "1," * 400 + "]")


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, says in {
        "none.yaml": "cannot be read: No such file",
        "": "is no file",
        "pipe.yaml": "is no file",
        "huge.yaml": "1 MiB at most",
        "latin.yaml": ":2: is no UTF-8 text",
        "a\0b": "cannot be read",
        "a\nb": "a\\nb: cannot be read",
    }.items():
        assert main(["recipe", "lint", f"{tmp_path}/{name}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert main(["recipe", "diff", f"{tmp_path}/{name}", f"{tmp_path}/{name}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_one_bad_file_among_good_ones_ends_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"good.yaml": GOOD, "bad.yaml": "a: ["}.items():
        (tmp_path / name).write_text(text)
    assert main(["recipe", "lint", f"{tmp_path}/good.yaml", f"{tmp_path}/bad.yaml"]) == 2
    assert "bad.yaml:1:" in capsys.readouterr().err


def test_escapes_in_values_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    for value in (r"\e[31m\a", r"\ud800", r"a\nb\rc"):
        path.write_text(GOOD.replace("type: vllm", f'typ: "{value}"').replace("8192", f'"{value}"'))
        for form in ([], ["--json"], ["--sarif"]):
            assert main(["recipe", "lint", str(path), *form]) == 1
            out = capsys.readouterr().out
            out.encode("utf-8")
            assert not any(ord(c) < 32 and c != "\n" for c in out)


def speak(path: Path) -> None:
    """Do everything that is done with a file."""
    report = lint([str(path)])
    list(lines(report))
    to_json(report)
    to_sarif(report)
    source = read(str(path))
    good = parse("good.yaml", GOOD if kind_of(source) == "recipe" else MASTER)
    for pair in ((source, source), (good, source)):
        list(diff_lines(*pair, compare(*pair)))


@given(
    text=st.lists(
        st.sampled_from(
            ["a", "resources", ": ", ":\n", "\n", "  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a",
             "<<", "|", ">", "'", '"', "#", " # 2D DEP8", "!", "%", "\t", "\\", "\r", "\x85",
             "\N{LINE SEPARATOR}", "1", "0x", "1e9", ".inf", "null", "?", "---", "...", "\0",
             "# rankfold: allow ", "name", "backend", "scenarios", "framework"]
        ),
        max_size=60,
    ).map("".join)
)  # fmt: skip
def test_no_text_makes_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("hostile") / "r.yaml"
    path.write_bytes(text.encode("utf-8"))
    try:
        speak(path)
    except BadRecipe as error:
        assert len(str(error).splitlines()) == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
PLACES = sorted({*parse("g", GOOD).keys, *parse("m", MASTER).keys}, key=str)


@given(data=st.data())
def test_no_value_at_any_key_makes_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Values of any type anywhere in a recipe or an entry: findings, or one line."""
    where = data.draw(st.sampled_from(PLACES))
    documents = [document for text in (GOOD, MASTER) if (document := yaml.safe_load(text))]
    for document in documents:
        holder = document
        for step in where[:-1]:
            holder = holder[step] if _has(holder, step) else None
        if _has(holder, where[-1]):
            holder[where[-1]] = data.draw(ANYTHING)
            break
    path = tmp_path_factory.mktemp("odd") / "r.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    try:
        speak(path)
    except BadRecipe as error:
        assert len(str(error).splitlines()) == 1


ODD = [
    None, True, 0, -1, 10**40, 1.5, float("nan"), "", "x y", [], [1], [[{}]], ["a"], {},
    {"a": {"b": [1]}}, {"prefill": 1},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", [GOOD, MASTER], ids=["recipe", "master"])
def test_an_odd_value_at_each_key_makes_no_traceback(tmp_path: Path, text: str) -> None:
    """Every key in turn, with three of the values; the next key has the next three."""
    path = tmp_path / "r.yaml"
    readable = 0
    for number, where in enumerate(parse("text", text).keys):
        for value in (ODD[(3 * number + n) % len(ODD)] for n in range(3)):
            document = holder = yaml.safe_load(text)
            for step in where[:-1]:
                holder = holder[step]
            holder[where[-1]] = value
            path.write_text(yaml.safe_dump(document))
            try:
                speak(path)
                readable += 1
            except BadRecipe as error:
                assert len(str(error).splitlines()) == 1
    assert readable > 50


def _has(holder: object, step: str | int) -> bool:
    if isinstance(holder, dict):
        return step in holder
    return isinstance(holder, list) and isinstance(step, int) and step < len(holder)

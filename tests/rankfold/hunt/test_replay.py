"""Replay files: written, read, refused where broken, and reproduced in a new process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from properties import Verdict
from rankfold.cli import main
from rankfold.errors import UsageError
from rankfold.example import Example
from rankfold.replay import VERSION, Expected, Replay

EXAMPLE = Example(
    topology="tep2pp2",
    layers="dd",
    dtype="bfloat16",
    moe_backend="deep_gemm_mega_moe",
    token_ids=(77,),
    seq_lens=(1,),
)
VERDICT = Verdict(
    name="oracle", ok=False, what="w", where="x", why="y", kind="counted too often", at="l"
)
FAULTY = Replay(
    vllm="0.33.0",
    fault="dense-mlp-all-reduces",
    example=EXAMPLE,
    verdict=Expected.of(
        Verdict(
            name="oracle",
            ok=False,
            what="layers.0.ffn is off",
            kind="counted too often",
            at="layers.0.ffn",
        )
    ),
)


def test_a_file_is_small_readable_and_read_back(tmp_path: Path) -> None:
    replay = Replay(vllm="0.33.0", example=EXAMPLE, verdict=Expected.of(VERDICT))
    path = replay.write(tmp_path / "deep" / "er")
    assert path.name.startswith("tep2pp2-counted-too-often-")
    assert path.stat().st_size < 2000 and len(path.read_text().splitlines()) > 20
    assert Replay.read(path) == replay
    # The same example has the same file, and nothing else is left there.
    assert replay.write(tmp_path / "deep" / "er") == path
    assert [*path.parent.iterdir()] == [path]


def content(**changes: Any) -> str:
    data = json.loads(FAULTY.model_dump_json())
    for key, value in changes.items():
        place = data
        *path, last = key.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    return json.dumps(data)


BROKEN = {
    "empty": ("", "broken JSON"),
    "cut off": (content()[:-40], "broken JSON"),
    "a list": ("[]", "not a JSON object"),
    "no version": ("{}", "no replay file"),
    "a version in words": (content(rankfold_replay="1"), "no replay file"),
    "version 0": (content(rankfold_replay=0), "no replay file"),
    "newer": (content(rankfold_replay=VERSION + 1), "is newer than this rankfold"),
    "an unknown key": (content(example__colour="red"), "example.colour"),
    "a field of another type": (content(example__layers=3), "example.layers"),
    "a negative token": (content(example__token_ids=[-1]), "example.token_ids"),
    "a token that the vocabulary lacks": (content(example__token_ids=[99999]), "vocabulary"),
    "lengths that do not sum": (content(example__seq_lens=[2]), "must sum"),
    "a topology that means nothing": (content(example__topology="zz9"), "zz9"),
    "a topology that does not divide": (content(example__topology="tep3pp2"), "do not divide"),
    "more stages than layers": (content(example__topology="tep2pp4"), "use pp1"),
    "an unknown fault": (content(fault="dense-mlp-all-reduce"), "did you mean"),
    "an unknown relation": (content(example__relation="magic"), "relation"),
    "a relation that the batch is too small for": (
        content(example__relation="batch split"),
        "has none",
    ),
    "an unknown dtype": (content(example__dtype="int3"), "--dtype"),
    "an aux id too large": (content(example__aux=[9]), "aux ids"),
    "deep nesting": ("[" * 100_000, "broken JSON"),
    "not text": ("\x00\xff", "broken JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, says = BROKEN[name]
    path = tmp_path / "file.json"
    path.write_text(text, encoding="latin-1")
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out
    assert len(said.err.strip().splitlines()) == 1


def test_a_missing_file_and_a_huge_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Replay.read(tmp_path / "nothing.json")
    huge = tmp_path / "huge.json"
    huge.write_bytes(b" " * (2 << 20))
    with pytest.raises(UsageError, match="larger than"):
        Replay.read(huge)


def replayed(path: Path) -> tuple[int, dict[str, Any]]:
    """A replay in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "rankfold", "replay", str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_fault_is_reproduced_in_a_new_process(tmp_path: Path) -> None:
    code, shown = replayed(FAULTY.write(tmp_path))
    assert code == 1
    assert shown["reproduced"] is True and shown["ok"] is False
    first = next(tap for tap in shown["taps"] if not tap["ok"])
    assert first["name"] == "layers.0.ffn" and first["kind"] == "counted too often"


def test_what_is_mended_holds(tmp_path: Path) -> None:
    mended = FAULTY.model_copy(update={"fault": None})
    code, shown = replayed(mended.write(tmp_path))
    assert code == 0
    assert shown["reproduced"] is False and shown["ok"] is True

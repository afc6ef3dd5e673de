"""A recipe as a deployment: its workers, its degrees, and what is not folded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankfold.deployment.recipe import deployment_or_recipe, fold
from rankfold.errors import UsageError
from rankfold.options import MEGA_MOE

ROOT = Path(__file__).parents[3] / "examples" / "recipes"
PAIR = "recipes/minimax-m3/gb300-fp8/8k1k"
CORRECTED = ROOT / "corrected" / PAIR / "3p1d-dep2-dep16-8k1k.yaml"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        (f"before/{PAIR}/3p2d-dep2-dep8-8k1k.yaml", "3p2d-dep2-dep8"),
        (f"after/{PAIR}/3p1d-dep2-dep16-8k1k.yaml", "3p1d-dep2-dep16"),
        (f"corrected/{PAIR}/3p1d-dep2-dep16-8k1k.yaml", "3p1d-dep2-dep16"),
        ("good/1p1d-dep2-tp4-eagle3-c64-8k1k.yaml", "1p1d-dep2-tp4"),
        ("good/1p3d-dep4-tp4-agentic.yaml", "1p3d-dep4-tp4"),
        ("good/agg-h100-tep8pp2-8k1k.yaml", "tep8pp2"),
    ],
)
def test_the_workers_are_the_recipes_own(path: str, word: str) -> None:
    folded = fold(str(ROOT / path))
    assert folded.deployment.word == word and folded.moe_backend == "auto"
    assert deployment_or_recipe(word).deployment == folded.deployment


def test_what_is_not_folded_is_said() -> None:
    notes = fold(str(ROOT / "good/1p1d-dep2-tp4-eagle3-c64-8k1k.yaml")).notes
    assert any(note.startswith("decode: speculative decoding") for note in notes)
    assert any("precision fp4" in note for note in notes)


def changed(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The corrected recipe with some text replaced, as a file."""
    text = CORRECTED.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "changed.yaml"
    path.write_text(text)
    return str(path)


def test_mega_moe_is_the_recipes_own(tmp_path: Path) -> None:
    flag = "enable-expert-parallel: true\n      moe-backend: deep_gemm_mega_moe"
    path = changed(tmp_path, ("enable-expert-parallel: true", flag))
    assert fold(path).moe_backend == MEGA_MOE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("data-parallel-size: 16", "data-parallel-size: 8"), "decode: dep8 has 8 ranks, and a"),
        (("type: vllm", "type: sglang"), "backend.type is sglang; only vllm is folded"),
        (("decode_workers: 1\n", "decode_workers: 0\n"), "name no workers that serve"),
        (
            ("data-parallel-size: 16", "decode-context-parallel-size: 2"),
            "decode-context-parallel-size is not folded",
        ),
        (("decode_workers: 1\n", "decode_workers: 30\n"), "use at most 16 workers"),
    ],
)
def test_what_cannot_be_folded_is_one_line(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        fold(changed(tmp_path, change))
    assert says in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["no-such.yaml", str(ROOT / "after/master.yaml")])
def test_no_recipe_is_one_line(path: str) -> None:
    with pytest.raises(UsageError) as refused:
        fold(path)
    assert path in str(refused.value) and len(str(refused.value).splitlines()) == 1

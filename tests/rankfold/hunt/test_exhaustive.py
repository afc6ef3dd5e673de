"""The exhaustive scope: its size, its order, and going on where it was stopped."""

from collections import Counter
from pathlib import Path

import pytest

from rankfold.errors import UsageError
from rankfold.hunt.exhaustive import Scope
from rankfold.hunt.resume import Done
from rankfold.hunt.run import HuntOptions, run_hunt
from sim import Topology


def counted() -> int:
    """The number of cases by the issue's words: all topologies up to 8 ranks, tokens 0 to 2 TP + 1,
    every dense/MoE pattern of 3 layers, SP on and off, aux at each id."""
    patterns, aux = 2**3, 1 + 4
    total = 0
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 3):
            if tp * pp > 8:
                continue
            tokens = len(range(0, 2 * tp + 2))
            # Without EP there is one mode; with it vLLM's experts, and MegaMoE with SP on and off.
            modes = 1 if tp == 1 else 1 + 3
            total += tokens * patterns * aux * modes
    return total


def test_the_number_of_cases_is_what_the_scope_says() -> None:
    scope = Scope.of()
    assert scope.cases == counted() == 9440
    assert scope.cases == sum(1 for block in scope.blocks for _ in block.examples())


def test_every_case_makes_sense_and_is_there_once() -> None:
    scope = Scope.of([Topology.parse(word) for word in ("tp2", "tep2pp2", "pp3")])
    cases = [example for block in scope.blocks for example in block.examples()]
    assert len({*cases}) == len(cases) == scope.cases
    for example in cases[:: len(cases) // 50]:
        example.options()
    assert Counter(example.sp for example in cases)["off"] > 0


def test_small_topologies_come_first() -> None:
    sizes = [block.topology.world_size for block in Scope.of().blocks]
    assert sizes == sorted(sizes)


def test_the_fingerprint_is_the_scopes() -> None:
    assert Scope.of().fingerprint == Scope.of().fingerprint
    assert Scope.of([Topology.parse("tp2")]).fingerprint != Scope.of().fingerprint


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    state = tmp_path / "state.json"

    def some(examples: int | None) -> HuntOptions:
        return HuntOptions(
            topologies=(Topology.parse("tp1"),),
            exhaustive=True,
            examples=examples,
            state=state,
            directory=tmp_path,
            workers=1,
        )

    first = run_hunt(some(50), lambda text: None)
    assert first.ok and first.cases == 160
    # Whole blocks of 20 cases count as done.
    assert first.done == 40
    second = run_hunt(some(None), lambda text: None)
    assert second.ok and second.done == 160
    assert second.tally.examples == 120
    third = run_hunt(some(None), lambda text: None)
    assert third.tally.examples == 0 and third.done == 160


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no progress"),
        ("[]", "no progress"),
        ('{"rankfold_exhaustive": 2, "scope": "x", "vllm": "1"}', "no progress"),
        ('{"rankfold_exhaustive": 1, "scope": "other", "vllm": "1"}', "another scope"),
        ('{"rankfold_exhaustive": 1, "scope": "SCOPE", "vllm": "1", "blocks": [9999]}', "blocks"),
        ('{"rankfold_exhaustive": 1, "scope": "SCOPE", "vllm": "1", "blocks": [1, 1]}', "blocks"),
    ],
)
def test_a_file_that_is_no_progress_is_refused_in_one_line(
    tmp_path: Path, content: str, says: str
) -> None:
    scope = Scope.of()
    path = tmp_path / "state.json"
    path.write_text(content.replace("SCOPE", scope.fingerprint))
    with pytest.raises(UsageError, match=says) as caught:
        Done.read(path, scope, "1")
    assert "\n" not in str(caught.value)


def test_another_version_of_vllm_begins_again(tmp_path: Path) -> None:
    scope = Scope.of()
    path = tmp_path / "state.json"
    Done(scope=scope.fingerprint, vllm="1", blocks=[0, 1]).write(path)
    assert Done.read(path, scope, "1").cases(scope) == len(scope.blocks[0]) * 2
    assert Done.read(path, scope, "2").blocks == []

"""The search: right code holds; a fault is found, told apart, and shrunk."""

from collections.abc import Iterator
from typing import Any

import pytest

from model.subject import prepare
from properties.faults import FAULTS
from rankfold.corpus import batch_of
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.hunt.search import Budget, Failure, Wrong, extent, search
from rankfold.hunt.space import Space
from rankfold.hunt.tally import Tally
from rankfold.hunt.topologies import DEGREES, all_topologies
from sim import Topology


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    prepare()


@pytest.fixture
def examiner() -> Iterator[Examiner]:
    with Examiner() as examiner:
        yield examiner


def hunt(
    examiner: Examiner, *words: str, examples: int, rich: bool = False
) -> tuple[Failure | None, Tally]:
    space = Space.of([Topology.parse(word) for word in words])
    tally = Tally()
    budget = Budget(seconds=None, examples=examples)
    first = space.rich() if rich else ()
    return search(space, 0, budget, examiner, tally, first=first), tally


def test_right_code_holds_over_all_topologies(examiner: Examiner) -> None:
    failure, tally = hunt(examiner, examples=120, rich=True)
    assert failure is None, failure
    assert tally.examples == 120
    assert {*tally.drawn["topology"]} == {t.word for t in all_topologies(replicas=DEGREES)}
    assert tally.known == {"partial aux at one stage": tally.known["partial aux at one stage"]}
    assert tally.known["partial aux at one stage"] > 0


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "float32", "layers": "dm", "aux": (1,)},
        # Here the bound is larger than what is missing, and the ranks differ even so.
        {
            "dtype": "bfloat16",
            "layers": "md",
            "aux": (0, 2),
            "moe_backend": "deep_gemm_mega_moe",
            "expert_dtype": "mxfp8",
            "sp": "off",
        },
    ],
)
def test_a_known_finding_is_set_aside_and_said(examiner: Examiner, more: dict[str, Any]) -> None:
    judged = examiner.examine(
        Example(topology="tep2", token_ids=batch_of((1,), 256), seq_lens=(1,), **more)
    )
    assert judged.headline is None
    assert {known.name for known in judged.known.values()} == {"partial aux at one stage"}


def test_the_same_seed_draws_the_same_examples(examiner: Examiner) -> None:
    _, one = hunt(examiner, "tp2", examples=25)
    _, two = hunt(examiner, "tp2", examples=25)
    assert one.drawn == two.drawn


SHRUNK = {
    # fault: topology, tokens, check, kind, tap
    "sp-at-one-stage-only": ("tep2pp2", 0, "sequence parallelism", "sequence parallelism", ""),
    "entry-keeps-residual": ("tep2pp2", 2, "oracle", "rows mixed", "layers.0.stream"),
    "exit-leaves-aux-sharded": ("tep2pp2", 2, "oracle", "gather missing", "stage.0.send.aux"),
    "dense-mlp-all-reduces": ("tep2pp2", 1, "oracle", "counted too often", "layers.0.ffn"),
    "exit-differs-by-rank": ("tep2pp2", 1, "oracle", "rows lost", "stage.0.send.hidden_states"),
}


@pytest.mark.parametrize("name", SHRUNK)
def test_each_undoing_of_seed_1_is_found_named_and_shrunk(name: str) -> None:
    topology, tokens, check, kind, at = SHRUNK[name]
    with FAULTS[name].apply(), Examiner() as examiner:
        failure, _ = hunt(examiner, examples=2000, rich=True)
    assert failure is not None
    assert (failure.example.topology, failure.example.tokens) == (topology, tokens)
    assert (failure.verdict.name, failure.verdict.kind) == (check, kind)
    assert failure.verdict.at.startswith(at)
    assert not failure.example.late and not failure.example.relation
    assert failure.tried == 1


def test_a_fault_is_found_without_the_rich_examples_too() -> None:
    with FAULTS["dense-mlp-all-reduces"].apply(), Examiner() as examiner:
        failure, _ = hunt(examiner, "tep2pp2", "tep4pp2", examples=2000)
    assert failure is not None
    assert failure.verdict.kind == "counted too often"
    assert (failure.example.topology, failure.example.tokens) == ("tep2pp2", 1)


def test_with_the_fault_off_the_failing_example_holds(examiner: Examiner) -> None:
    with FAULTS["dense-mlp-all-reduces"].apply(), Examiner() as faulty:
        failure, _ = hunt(faulty, "tep2pp2", examples=2000, rich=True)
    assert failure is not None
    assert examiner.examine(failure.example).headline is None


def test_failures_of_different_kinds_are_told_apart(examiner: Examiner) -> None:
    with FAULTS["dense-mlp-all-reduces"].apply(), Examiner() as faulty:
        failure, _ = hunt(faulty, "tep2pp2", examples=2000, rich=True)
    assert failure is not None
    one = failure.verdict
    assert type(Wrong.of(one)) is type(Wrong.of(one))
    from dataclasses import replace

    assert type(Wrong.of(one)) is not type(Wrong.of(replace(one, kind="scaled")))


def test_the_budget_of_seconds_ends_a_search(examiner: Examiner) -> None:
    tally = Tally()
    space = Space.of([Topology.parse("tp1")])
    budget = Budget(seconds=1.0, examples=None)
    assert search(space, 0, budget, examiner, tally) is None
    assert tally.examples > 0 and budget.elapsed < 30


def test_extent_counts_ranks_before_tokens() -> None:
    small = Example(topology="tp2", token_ids=(1, 2, 3), seq_lens=(3,))
    large = Example(topology="tp4", token_ids=(1,), seq_lens=(1,))
    assert extent(small) < extent(large)

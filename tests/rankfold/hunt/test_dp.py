"""The search over data parallelism: right code holds, faults are found, shrunk and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.subject import prepare
from properties.faults import FAULTS
from rankfold.cli import main
from rankfold.corpus import batch_of
from rankfold.errors import UsageError
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.hunt.space import Space
from sim import Topology


def example(word: str, *tokens: int, **fields: Any) -> Example:
    """So many tokens on the DP ranks, in one sequence each."""
    lens = tuple(count for count in tokens if count)
    ids = tuple(t for dp_rank, count in enumerate(tokens) for t in batch_of((count,), 256, dp_rank))
    plain = {"layers": "dm", "dp_seqs": tuple(int(count > 0) for count in tokens)}
    return Example(topology=word, token_ids=ids, seq_lens=lens, **{**plain, **fields})


@pytest.fixture(scope="module")
def examiner() -> Any:
    prepare()
    with Examiner() as made:
        yield made


@pytest.mark.parametrize(
    "one",
    [
        example("dep2", 5, 1),
        example("dep2", 0, 3, relation="tokens changed"),
        example("dep2", 0, 0),
        example("dep4", 4, 4, 4, 4, late=True, schedule=7),
        example("dp2tep2", 3, 6, attention="model", aux=(1,)),
        example("dp2tp2pp2", 2, 5, layers="dmd", relation="tokens changed"),
        example("dep8", 1, 0, 2, 0, 3, 0, 0, 9, dtype="bfloat16"),
        example("dep2", 3, 8, dtype="bfloat16", moe_backend="deep_gemm_mega_moe"),
    ],
    ids=str,
)
def test_right_code_holds(one: Example, examiner: Examiner) -> None:
    judgement = examiner.examine(one)
    assert judgement.ok, judgement.headline
    names = {tap.name for tap in judgement.taps}
    assert {"dp0.layers.0.ffn", "dp1.layers.0.ffn"} <= names
    assert ("metamorphic" in {check.name for check in judgement.checks}) == bool(one.relation)


def test_a_known_finding_is_set_aside_on_every_dp_rank(examiner: Examiner) -> None:
    judgement = examiner.examine(example("dp2tp2", 3, 4, aux=(1,)))
    assert judgement.ok and {*judgement.known} == {"dp0.aux.1", "dp1.aux.1"}


def test_a_fault_is_said_of_its_dp_rank() -> None:
    prepare()
    with FAULTS["dep-dispatch-does-nothing"].apply(), Examiner() as examiner:
        verdict = examiner.examine(example("dep2", 3, 4)).headline
    assert verdict is not None and verdict.at == "dp0.layers.1.ffn"


def test_a_fault_is_found_shrunk_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hunt = ["hunt", "--topology", "dep4", "--fault", "dep-way-by-own-tokens", "--workers", "1"]
    assert main([*hunt, "--seconds", "60", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["drawn"]["dp_tokens"]
    failure = found["failure"]
    assert failure["tokens"] <= 4 and Topology.parse(failure["topology"]).dp in (2, 4)
    # The step breaks: the ranks gather by two ways.
    assert main(["replay", failure["replay"], "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["reproduced"] is True


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (example("dep2", 3, 4, dp_seqs=(1, 1, 0)), "give a number for each of the 2 DP ranks"),
        (example("dep2", 3, 4, dp_seqs=(2, 1)), "2 sequences in all"),
        (example("dep2", 3, 4, dp_seqs=()), "give a number for each"),
        (example("tp2", 3, 4), "has one DP rank"),
        (example("dep2", 3, 4, decode=1), "has DP ranks"),
        (example("dep2", 3, 4, relation="batch split"), "on DP ranks use 'tokens changed'"),
        (example("dep2", 0, 0, relation="tokens changed"), "there are no tokens to change"),
    ],
    ids=["too many", "too large", "none", "no DP", "steps", "relation", "no tokens"],
)
def test_examples_that_make_no_sense_are_one_line(one: Example, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        one.options()
    assert says in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_the_exhaustive_scope_has_one_dp_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hunt", "--exhaustive", "--topology", "dep2"]) == 2
    assert "the exhaustive scope has no data parallelism" in capsys.readouterr().err


def test_rich_examples_of_dp_ranks_are_uneven() -> None:
    for one in Space.of([Topology.parse("dep4"), Topology.parse("dp2tp2")]).rich():
        counts = [batch.tokens for batch in one.batches()]
        assert len({*counts}) > 1 and one.options()
        assert (0 in counts) == (len(counts) > 2)

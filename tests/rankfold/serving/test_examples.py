"""Examples in several steps: as the hunt draws, examines and replays them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from model.batch import Batch
from model.subject import prepare
from model.taps import Captured
from properties.faults import FAULTS
from rankfold import verdicts
from rankfold.corpus import batch_of
from rankfold.errors import UsageError
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.options import Options
from rankfold.replay import Expected, Replay, run_replay
from rankfold.run import Outcome
from sim import Topology

LENS = (11, 3, 1)


def example(**more: Any) -> Example:
    fields = {"seq_lens": LENS, "token_ids": batch_of(LENS, 256), **more}
    return Example(topology="tep2pp2", layers="dm", attention="model", **fields)


def test_the_last_tokens_come_one_a_step_and_never_the_first() -> None:
    one = example(decode=2, chunk=4)
    plan = one.plan()
    assert plan.prompts == (9, 1, 1) and plan.lengths == LENS
    assert [len(tokens) for tokens in one.sequences()] == [*LENS]
    assert [t for tokens in one.sequences() for t in tokens] == list(one.token_ids)
    assert "attention model, chunks of 4, decode 2" in str(one)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"decode": 1, "seq_lens": (2, 0), "token_ids": (1, 2)}, "one token or more"),
        ({"decode": 1, "relation": "batch split"}, "in steps use"),
        ({}, "with sparse attention use ones of 1 first"),
        ({"seq_lens": (1,) * 9, "token_ids": (1,) * 9}, "9 sequences: use 1 to 8"),
    ],
)
def test_an_example_that_makes_no_sense_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        example(**more).options()


@pytest.mark.parametrize("steps", [(0, 2), (3, 0), (3, 2)])
def test_examples_in_steps_hold_with_their_relation(steps: tuple[int, int]) -> None:
    prepare()
    one = example(chunk=steps[0], decode=steps[1], relation="tokens changed", late=True)
    with Examiner() as examiner:
        judged = examiner.examine(one)
    assert judged.ok, judged.headline
    assert {"metamorphic", "selection"} <= {check.name for check in judged.checks}


def test_an_example_in_steps_is_replayed(tmp_path: Path) -> None:
    prepare()
    fault = FAULTS["decode-positions-one-late"]
    one = example(decode=2)
    with fault.apply(), Examiner() as examiner:
        verdict = examiner.examine(one).headline
    assert verdict is not None
    path = Replay(vllm="0.33.0", fault=fault.name, example=one, verdict=Expected.of(verdict)).write(
        tmp_path
    )
    assert Replay.read(path).example == one
    shown = run_replay(path, lambda text: None)
    assert shown.reproduced and shown.report.violated_step == 1


def test_a_file_from_before_there_were_steps_means_what_it_meant() -> None:
    old = Example.model_validate({"topology": "tp2", "token_ids": [1, 2], "seq_lens": [2]})
    assert old.attention == "dense" and not old.in_steps
    assert old.options().tiny.sparse_layers == ()


def outcome(word: str, logprobs: torch.Tensor, blocks: torch.Tensor) -> Outcome:
    topology = Topology.parse(word)
    of_rank = blocks.shape[1] // topology.tp
    name = "layers.0.blocks_chosen"
    results = [
        SimpleNamespace(
            taps={
                name: Captured(
                    name=name,
                    value=blocks[:, rank * of_rank : (rank + 1) * of_rank],
                    declared="heads:tp:4",
                )
            },
            logprobs=logprobs,
        )
        for rank in range(topology.tp)
    ]
    return cast(
        Outcome,
        SimpleNamespace(
            topology=topology, captured=[r.taps for r in results], logprobs=logprobs, broke=None
        ),
    )


def test_against_another_tp_degree_a_near_tie_between_blocks_is_no_failure() -> None:
    options = Options(topology=Topology.parse("tp2"), layers="d", attention="sparse", tokens=4)
    batch = Batch.of([1, 2, 3, 4], [2, 2])
    blocks = torch.zeros(4, 4, 3, dtype=torch.int64)
    other = blocks.clone()
    other[2, 1, 0] = 1
    logprobs = torch.zeros(4, 8)
    moved = logprobs.clone()
    moved[2:] += 0.5
    two = outcome("tp2", logprobs, blocks)
    verdict, against = verdicts.against(options, batch, two, outcome("tp4", moved, other), 1e-4)
    assert verdict.ok and against.max_abs_delta == 0
    assert "but for 2 rows from a near tie on" in verdict.what
    # Rows before it, and runs that chose alike, still count.
    moved[1] += 0.5
    verdict, _ = verdicts.against(options, batch, two, outcome("tp4", moved, other), 1e-4)
    assert not verdict.ok
    verdict, _ = verdicts.against(options, batch, two, outcome("tp4", moved, blocks), 1e-4)
    assert not verdict.ok

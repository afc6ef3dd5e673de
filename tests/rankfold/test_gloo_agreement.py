"""Folded and real gloo ranks agree: ledgers, outputs and verdicts, with and without faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model.subject import prepare
from properties.faults import find
from rankfold.agreement import disagreement, see
from rankfold.agreement_search import compare_many
from rankfold.corpus import batch_of
from rankfold.examiner import References
from rankfold.example import Example
from rankfold.processes import RankProcesses, new_pool
from rankfold.rig import Rig
from sim.gloo import GlooPool
from sim.ledger import first_difference

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

EXAMPLES = 40
"""scripts/agreement.py runs more."""


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    """Processes that have imported vLLM, as this one has."""
    with new_pool() as pool:
        prepare()
        yield pool


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by all tests of this module."""
    return References()


def example(word: str, **fields: object) -> Example:
    """Nine tokens in two sequences."""
    plain = {"layers": "dmmm", "token_ids": batch_of((5, 4), 256), "seq_lens": (5, 4)}
    return Example(topology=word, **{**plain, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["tep2pp2", "tep4pp2"])
@pytest.mark.parametrize("mega", [False, True])
def test_steps_hold_and_the_ledgers_are_equal(
    pool: GlooPool, references: References, word: str, mega: bool
) -> None:
    fields = {"moe_backend": "deep_gemm_mega_moe", "dtype": "bfloat16"} if mega else {}
    chosen = example(word, **fields)
    with Rig() as folded, Rig(processes=RankProcesses(pool)) as gloo:
        seen = [see(rig, chosen, references) for rig in (folded, gloo)]
    assert [each.headline for each in seen] == [None, None]
    ours, theirs = (each.outcome for each in seen)
    assert ours is not None and theirs is not None
    assert len(ours.ledger) >= 20
    assert first_difference(ours.ledger.entries, theirs.ledger.entries) is None
    assert disagreement(*seen) is None


@pytest.mark.parametrize(
    ("fault", "word", "fields", "check"),
    [
        ("attention-reduced-twice", "tp2", {}, "oracle"),
        ("rank-skips-a-reduction", "tp2", {}, "ledger"),
        ("norm-sums-over-the-world", "tp2pp2", {}, "ledger"),
    ],
)
def test_a_fault_is_on_in_the_ranks_and_has_the_same_verdict(
    pool: GlooPool,
    references: References,
    fault: str,
    word: str,
    fields: dict[str, object],
    check: str,
) -> None:
    chosen = example(word, **fields)
    with find(fault).apply(), Rig() as rig:
        folded = see(rig, chosen, references)
    with Rig(processes=RankProcesses(pool, fault=fault)) as rig:
        gloo = see(rig, chosen, references)
    assert folded.headline is not None
    assert folded.headline[0] == check
    assert disagreement(folded, gloo) is None
    # The same processes without the fault: nothing of it is left in them.
    with Rig(processes=RankProcesses(pool)) as rig:
        assert see(rig, chosen, references).headline is None


def test_a_disagreement_is_seen(references: References) -> None:
    chosen = example("tp2")
    with Rig() as rig:
        one = see(rig, chosen, references)
        other = see(rig, chosen, references)
        with find("attention-reduced-twice").apply(), Rig() as faulty:
            wrong = see(faulty, chosen, references)
    assert disagreement(one, other) is None
    assert "verdicts" in (disagreement(one, wrong) or "")
    assert other.outcome is not None
    tap = other.outcome.results[1].taps["layers.0.ffn"]
    torch.nextafter(tap.value, torch.tensor(1e9), out=tap.value)
    assert "tap layers.0.ffn of rank 1" in (disagreement(one, other) or "")
    other.outcome.ledger.entries.pop()
    assert "ledgers" in (disagreement(one, other) or "")
    other.outcome.ledger.entries.append(replace_site(one))
    assert "ledgers" in (disagreement(one, other) or "")


def replace_site(seen):  # type: ignore[no-untyped-def]
    """The last entry of a run, with other bytes."""
    return seen.outcome.ledger.entries[-1]._replace(bytes=1)


def test_random_examples_agree() -> None:
    compared = list(compare_many(EXAMPLES, seed=1))
    assert [str(each) for each in compared if each.wrong] == []
    assert len(compared) == EXAMPLES
    assert sum(each.headline is not None for each in compared) >= EXAMPLES // 8

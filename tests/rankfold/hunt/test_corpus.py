"""The corpus: its rows are those of a reference that is computed for the batch itself."""

from collections.abc import Iterator

import pytest
import torch

from model.batch import Batch
from model.subject import prepare
from rankfold.corpus import Corpus, batch_of
from rankfold.example import Example
from rankfold.options import MEGA_MOE, Options
from rankfold.rig import Rig
from rankfold.run import Outcome
from rankfold.truth import truth_of


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    prepare()
    with Rig() as rig:
        yield rig


def example(seq_lens: tuple[int, ...], **more: object) -> Example:
    return Example(topology="tep2", token_ids=batch_of(seq_lens, 256), seq_lens=seq_lens, **more)


@pytest.mark.parametrize(
    ("seq_lens", "more"),
    [
        ((5,), {"layers": "dm"}),
        ((0,), {"layers": "m"}),
        ((2, 7, 4), {"layers": "md", "aux": (1,)}),
        ((3, 9), {"layers": "dm", "moe_backend": MEGA_MOE, "dtype": "bfloat16"}),
    ],
)
def test_its_truth_is_that_of_the_batch(
    rig: Rig, seq_lens: tuple[int, ...], more: dict[str, object]
) -> None:
    one = example(seq_lens, **more)
    options, batch = one.options(), one.batch()
    outcome = rig.step(options, batch)
    weights = rig.weights(options)
    own = truth_of(options, weights, batch, outcome)
    shared = Corpus.of(options, weights).truth(options, weights, batch, outcome)
    assert list(shared.taps) == list(own.taps)
    for name, tap in own.taps.items():
        # Float64 sums of other shapes may run in another order.
        torch.testing.assert_close(shared.taps[name], tap, rtol=1e-9, atol=1e-9, msg=name)
    assert shared.parts.keys() == own.parts.keys()
    assert all(bound >= 0 for bound in shared.bounds.values())
    if batch.tokens:
        # Bounds of a part are not larger than those of the whole, but for the chance of probes.
        ratios = [own.bounds[n] / shared.bounds[n] for n in own.bounds if shared.bounds[n]]
        assert max(ratios) < 2


def test_a_batch_of_other_texts_has_a_reference_of_its_own(rig: Rig) -> None:
    one = Example(topology="tep2", token_ids=(9, 8, 7), seq_lens=(3,))
    options, batch = one.options(), one.batch()
    outcome = rig.step(options, batch)
    weights = rig.weights(options)
    own = truth_of(options, weights, batch, outcome)
    shared = Corpus.of(options, weights).truth(options, weights, batch, outcome)
    assert all(torch.equal(shared.taps[name], tap) for name, tap in own.taps.items())


TIED = (0, 1)
"""Experts that are alike to the router, so that it may choose either."""


def tied_run(rig: Rig, seq_lens: tuple[int, ...]) -> tuple[Options, Batch, Outcome]:
    """A run of a model two of whose experts are alike to the router."""
    one = example(seq_lens, layers="m", weights=7)
    options, batch = one.options(), one.batch()
    weights = rig.weights(options)
    others = options.tiny.num_experts_per_tok - 1
    for name, weight in weights.items():
        if name.endswith(".gate.weight"):
            weight[TIED[1]] = weight[TIED[0]]
        if name.endswith("e_score_correction_bias"):
            # All tokens go to these others first, and then to one of the two.
            weight[:] = 0.0
            weight[2 : 2 + others] = 10.0
            weight[[*TIED]] = 5.0
    return options, batch, rig.step(options, batch)


def choose(outcome: Outcome, instead: dict[int, int]) -> int:
    """Have a run say that it chose other experts; returns how many tokens are of another mind."""
    changed = 0
    for result in outcome.results:
        tap = result.taps["layers.0.experts_chosen"]
        for row, experts in enumerate(tap.value.tolist()):
            now = sorted(instead.get(expert, expert) for expert in experts)
            if now != experts and len({*now}) == len(now):
                tap.value[row] = torch.tensor(now)
                changed += 1
    return changed


def test_a_choice_between_equals_is_followed_once_for_all_texts(rig: Rig) -> None:
    options, batch, outcome = tied_run(rig, (9, 4))
    weights = rig.weights(options)
    corpus = Corpus.of(options, weights)
    corpus.truth(options, weights, batch, outcome)
    assert not corpus.followed
    first, second = TIED
    assert choose(outcome, {first: second})
    shared = corpus.truth(options, weights, batch, outcome)
    assert len(corpus.followed) == 1
    assert not shared.routing_rejected
    own = truth_of(options, weights, batch, outcome)
    for name, tap in own.taps.items():
        torch.testing.assert_close(shared.taps[name], tap, rtol=1e-9, atol=1e-9, msg=name)
    # Another batch whose tokens chose so is a part of the same run.
    options, batch, outcome = tied_run(rig, (5,))
    assert choose(outcome, {first: second})
    shared = corpus.truth(options, weights, batch, outcome)
    assert len(corpus.followed) == 1
    own = truth_of(options, weights, batch, outcome)
    for name, tap in own.taps.items():
        torch.testing.assert_close(shared.taps[name], tap, rtol=1e-9, atol=1e-9, msg=name)


def test_a_choice_of_worse_experts_is_not_followed(rig: Rig) -> None:
    options, batch, outcome = tied_run(rig, (9, 4))
    weights = rig.weights(options)
    corpus = Corpus.of(options, weights)
    assert choose(outcome, {0: options.tiny.num_local_experts - 1})
    shared = corpus.truth(options, weights, batch, outcome)
    assert shared.routing_rejected
    assert not corpus.followed

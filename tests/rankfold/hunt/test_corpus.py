"""The corpus: its rows are those of a reference that is computed for the batch itself."""

from collections.abc import Iterator

import pytest
import torch

from model.subject import prepare
from rankfold.corpus import Corpus, batch_of
from rankfold.example import Example
from rankfold.options import MEGA_MOE
from rankfold.rig import Rig
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

"""The same requests on every topology: equal bits at the same TP, the same tokens on all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.subject import prepare
from rankfold.options import MEGA_MOE, Options
from rankfold.rig import Rig
from rankfold.serving.check import on, plan_for
from rankfold.serving.compare import Run, compare
from rankfold.serving.drive import Served, serve
from rankfold.serving.request import Request
from rankfold.serving.sampling import Sampling
from rankfold.serving.truth import truths_of
from sim import Topology

PROMPTS: list[tuple[int, ...]] = [
    tuple(prompt) for prompt in json.loads((Path(__file__).parent / "prompts.json").read_text())
]
"""Six prompts; each token but the first of each is scored: 405 positions (S1-6)."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    prepare()
    with Rig() as rig:
        yield rig


def run(rig: Rig, options: Options, requests: list[Request]) -> Served:
    served = serve(
        on(rig, options), plan_for(requests, options), [r.prompt for r in requests], GREEDY
    )
    assert served.whole and not served.differ
    return served


GREEDY = Sampling()


def mega(word: str, sp: str = "auto") -> Options:
    topology = Topology.parse(word)
    return Options(topology=topology, attention="model", moe_backend=MEGA_MOE, sp=sp)


@pytest.mark.slow
def test_prompt_logprobs_of_405_positions_are_those_of_one_stage(rig: Rig) -> None:
    requests = [Request(prompt=prompt) for prompt in PROMPTS]
    one = run(rig, mega("tep2"), requests)
    assert one.outcomes[0].facts["sequence_parallel"]
    assert sum(map(len, one.prompt_logprobs)) == 405
    for word in ("tep2pp2", "tep2pp4"):
        other = run(rig, mega(word), requests)
        assert other.outcomes[0].facts["sequence_parallel"]
        # Equal floats: the largest difference is 0.
        assert other.prompt_logprobs == one.prompt_logprobs
        assert other.sampled == one.sampled


WORDS = ["pp2", "pp4", "tp2", "tp2pp2", "tp2pp4", "tp4", "tp4pp2", "tp8"]
GENERATED = 64
SHORT = [Request(prompt=PROMPTS[0][:5], decode=GENERATED - 1)]


def plain(word: str) -> Options:
    return Options(topology=Topology.parse(word), attention="model")


@pytest.fixture(scope="module")
def alone(rig: Rig) -> Run:
    options = plain("tp1")
    served = run(rig, options, SHORT)
    return Run(
        options=options,
        served=served,
        bounds=truths_of(options, rig.weights(options), served)[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_64_greedy_tokens_are_the_same_on_every_topology(rig: Rig, alone: Run, word: str) -> None:
    options = plain(word)
    served = run(rig, options, SHORT)
    other = Run(
        options=options,
        served=served,
        bounds=truths_of(options, rig.weights(options), served)[1],
    )
    verdict, against = compare(alone, other, GREEDY)
    assert verdict.ok, verdict
    # With these weights no near tie falls the other way in float32.
    assert against.same_tokens and not against.near_ties
    assert served.sampled == alone.served.sampled and len(served.sampled[0]) == GENERATED


@pytest.mark.slow
@pytest.mark.parametrize("word", ["tep2", "tep2pp2", "tep2pp4", "tep4", "tep4pp2", "tep8"])
def test_64_greedy_tokens_are_the_same_with_and_without_sequence_parallelism(
    rig: Rig, word: str
) -> None:
    runs = []
    for sp in ("auto", "off"):
        options = mega(word, sp)
        served = run(rig, options, SHORT)
        bounds = truths_of(options, rig.weights(options), served)[1]
        runs.append(Run(options=options, served=served, bounds=bounds))
    verdict, against = compare(*runs, GREEDY)
    assert verdict.ok, verdict
    assert against.same_tokens or against.near_ties

"""Words of deployments."""

from __future__ import annotations

import pytest

from rankfold.deployment.fleet import Deployment, is_deployment
from rankfold.errors import UsageError
from sim import TopologyError


@pytest.mark.parametrize(
    ("word", "ranks", "sides"),
    [
        ("3p1d-dep2-dep16", 22, {"prefill": (3, "dep2"), "decode": (1, "dep16")}),
        ("3p2d-dep2-dep8", 22, {"prefill": (3, "dep2"), "decode": (2, "dep8")}),
        ("1p1d-tep2pp2-dp2tp2", 8, {"prefill": (1, "tep2pp2"), "decode": (1, "dp2tp2")}),
        ("2a-tep8", 16, {"worker": (2, "tep8")}),
        ("tp1", 1, {"worker": (1, "tp1")}),
    ],
)
def test_a_word_says_which_workers_there_are(
    word: str, ranks: int, sides: dict[str, tuple[int, str]]
) -> None:
    deployment = Deployment.parse(word)
    assert deployment.word == word and deployment.ranks == ranks
    found = {side: (f.workers, f.topology.word) for side, f in deployment.fleets.items()}
    assert found == sides
    assert is_deployment(word) == ("-" in word)


def test_one_worker_has_the_word_of_its_topology() -> None:
    assert Deployment.parse("1a-tep8").word == "tep8"


@pytest.mark.parametrize(
    "word", ["0p1d-tp1-tp1", "1p0d-tp1-tp1", "1p1d-tp1", "1p1d-banana-tp1", "3p-tp1", "banana", ""]
)
def test_words_that_make_no_sense_are_refused(word: str) -> None:
    with pytest.raises((UsageError, TopologyError)) as refused:
        Deployment.parse(word)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("word", ["99p1d-tp1-tp1", "2p2d-dep72-dep72"])
def test_a_deployment_has_an_end(word: str) -> None:
    with pytest.raises(UsageError, match="use at most 16 workers and 160 ranks"):
        Deployment.parse(word)

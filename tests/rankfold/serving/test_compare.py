"""Two runs of the same requests: equal bits, rounding, near ties, and what is none of these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

import reference
from rankfold.options import Options
from rankfold.report import Against
from rankfold.serving.compare import Run, compare
from rankfold.serving.drive import Served
from rankfold.serving.plan import plan_of
from rankfold.serving.sampling import Sampling
from sim import Topology

VOCAB, PROMPTS, DECODE = 6, (3, 2), (2, 2)
BOUND = 1e-3
LENGTHS = [p + d for p, d in zip(PROMPTS, DECODE, strict=True)]


class Case:
    """A run whose logits are given: the reference's of the whole sequences."""

    def __init__(self, word: str, tokens: tuple[tuple[int, ...], ...]) -> None:
        self.word, self.sampled = word, [list(of_one) for of_one in tokens]
        self.logits = torch.zeros(sum(LENGTHS), VOCAB, dtype=torch.float64)
        self.experts = torch.zeros(sum(LENGTHS), 2, dtype=torch.int64)
        self.scores = [[-1.0, -2.0], [-3.0]]

    def run(self) -> Run:
        plan = plan_of(PROMPTS, DECODE)
        fed = [[0] * p + t[:-1] for p, t in zip(PROMPTS, self.sampled, strict=True)]
        served = Served(
            plan=plan,
            tokens=fed,
            sampled=self.sampled,
            prompt_logprobs=self.scores,
            logprobs=[[-1.0] * len(tokens) for tokens in self.sampled],
            outcomes=cast(list[Any], [None] * len(plan.steps)),
        )
        taps = {"layers.1.experts_chosen": self.experts, "logits": self.logits}
        bounds = SimpleNamespace(
            taps={"logprobs": BOUND, "logits": BOUND}, result=SimpleNamespace(taps=taps)
        )
        return Run(
            options=Options(topology=Topology.parse(self.word)),
            served=served,
            bounds=cast(reference.Bounds, bounds),
        )


TOKENS = ((1, 2, 3), (4, 5, 1))


def compared(one: Case, other: Case) -> tuple[bool, str, Against]:
    verdict, against = compare(one.run(), other.run(), Sampling())
    return verdict.ok, f"{verdict.what}; {verdict.where}", against


def test_equal_runs_are_equal_bit_for_bit() -> None:
    ok, what, against = compared(Case("tp2", TOKENS), Case("tp2pp2", TOKENS))
    assert ok and "are equal bit for bit" in what
    assert against.same_tokens and against.max_abs_delta == against.bound == 0


def test_at_the_same_tp_the_last_bit_of_a_prompt_logprob_counts() -> None:
    other = Case("tp2pp2", TOKENS)
    other.scores = [[-1.0, -2.0000001], [-3.0]]
    ok, what, _ = compared(Case("tp2", TOKENS), other)
    assert not ok and "request 0: prompt logprobs differ by 1e-07" in what
    # The same difference between TP degrees is rounding.
    other.word = "tp4"
    ok, what, against = compared(Case("tp2", TOKENS), other)
    assert ok and "within rounding (0.002)" in what
    assert 0 < against.max_abs_delta < against.bound == 2 * BOUND


def test_at_the_same_tp_another_token_is_wrong() -> None:
    ok, what, against = compared(Case("tp2", TOKENS), Case("tp2pp2", (TOKENS[0], (4, 2, 1))))
    assert not ok and "request 1: token 1 differs" in what and not against.same_tokens


def test_a_logprob_beyond_rounding_is_wrong() -> None:
    other = Case("tp4", TOKENS)
    other.scores = [[-1.0, -2.0], [-3.01]]
    ok, what, _ = compared(Case("tp2", TOKENS), other)
    assert not ok and "request 1: prompt logprobs differ by 0.01" in what


def test_a_near_tie_between_tokens_is_said_and_no_failure() -> None:
    one, other = Case("tp2", TOKENS), Case("tp4", ((1, 5, 0), TOKENS[1]))
    # The row that token 1 of request 0 is sampled from: after its three prompt tokens and one more.
    one.logits[3, 2], one.logits[3, 5] = 7.0, 7.0 - 1.5 * BOUND
    ok, what, against = compared(one, other)
    assert ok and not against.same_tokens
    assert against.near_ties == ["request 0: near tie at token 1: margin 0.0015 within bound 0.002"]
    assert against.near_ties[0] in what


def test_tokens_that_are_no_near_tie_are_wrong() -> None:
    one, other = Case("tp2", TOKENS), Case("tp4", ((1, 5, 0), TOKENS[1]))
    one.logits[3, 2], one.logits[3, 5] = 7.0, 7.0 - 2.5 * BOUND
    ok, what, against = compared(one, other)
    assert not ok and not against.near_ties
    assert "request 0: token 1 is 2 and 5, whose scores are 0.0025 apart" in what


def test_after_another_choice_of_experts_nothing_is_compared_and_it_is_said() -> None:
    one, other = Case("tp2", TOKENS), Case("tp4", (TOKENS[0], (4, 2, 1)))
    other.scores = [[-1.0, -2.5], [-3.0]]
    one.logits[6, 5] = 9.0
    # Request 0 chooses otherwise at its second token, request 1 at its third.
    other.experts[1, 1] = 7
    other.experts[LENGTHS[0] + 2, 0] = 7
    ok, what, against = compared(one, other)
    assert ok, what
    assert against.near_ties == [
        "request 0: near tie between experts of layer 1 at position 1",
        "request 1: near tie between experts of layer 1 at position 2; tokens differ from 1 on",
    ]
    # What came before it still counts.
    other.scores = [[-1.5, -2.5], [-3.0]]
    ok, what, _ = compared(one, other)
    assert not ok and "request 0: prompt logprobs differ by 0.5" in what


def test_a_choice_after_the_tokens_part_is_no_excuse() -> None:
    one, other = Case("tp2", TOKENS), Case("tp4", (TOKENS[0], (4, 2, 1)))
    one.logits[LENGTHS[0] + 2, 5] = 9.0
    other.experts[LENGTHS[0] + 3, 0] = 7
    ok, what, _ = compared(one, other)
    assert not ok and "request 1: token 1 is 5 and 2" in what

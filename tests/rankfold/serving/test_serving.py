"""Requests are driven and judged against rows of whole sequences; the first wrong step is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from properties import Verdict
from rankfold.options import Options
from rankfold.serving.check import plan_for
from rankfold.serving.drive import Served, serve
from rankfold.serving.judge import ServedJudgement, judge_steps
from rankfold.serving.relate import related_steps
from rankfold.serving.request import Request
from rankfold.serving.sampling import Sampling
from rankfold.serving.truth import rows_by_step, truths_of, whole_of
from sim import Topology
from tests.rankfold.serving.fakes import Damage, Ranks, unharmed

REQUESTS = (
    Request(prompt=(5, 17, 200, 3, 9, 31, 77), decode=3),
    Request(prompt=(8, 2), decode=3),
)
PROMPTS = [request.prompt for request in REQUESTS]


def options(**more: object) -> Options:
    return Options(topology=Topology.parse("tp2"), layers="dm", **more)  # type: ignore[arg-type]


def served_by(ranks: Ranks, sampling: Sampling | None = None) -> Served:
    return serve(ranks.step, plan_for(REQUESTS, ranks.options), PROMPTS, sampling or Sampling())


def judged(ranks: Ranks, served: Served, related: bool = False) -> ServedJudgement:
    of_steps = related_steps(ranks.step, served, 256) if related else ()
    truths, _ = truths_of(ranks.options, ranks.weights, served)
    return judge_steps(ranks.options, served, truths, related=of_steps)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_what_is_sampled_is_the_largest_logit_of_the_whole_sequence(chunk: int) -> None:
    ranks = Ranks(options(chunk=chunk))
    served = served_by(ranks)
    assert served.whole and not served.differ
    assert served.lengths == [10, 5]
    for i, request in enumerate(REQUESTS):
        assert len(served.sampled[i]) == 4
        assert served.tokens[i] == [*request.prompt, *served.sampled[i][:3]]
    # One run of each whole sequence says the same.
    again = Ranks(options())
    plan = plan_for([Request(prompt=tuple(t)) for t in served.tokens], again.options)
    whole = serve(again.step, plan, served.tokens)
    logprobs = whole.outcomes[0].logprobs
    rows = {place: row for row, place in enumerate(plan.steps[0].rows())}
    for i, request in enumerate(REQUESTS):
        prompt = len(request.prompt)
        for count, token in enumerate(served.sampled[i]):
            assert token == int(logprobs[rows[i, prompt - 1 + count]].argmax())
        expected = [float(logprobs[rows[i, p], request.prompt[p + 1]]) for p in range(prompt - 1)]
        assert served.prompt_logprobs[i] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_every_step_holds_against_rows_of_the_whole_sequences(chunk: int) -> None:
    ranks = Ranks(options(chunk=chunk))
    served = served_by(ranks)
    of_all = judged(ranks, served, related=True)
    assert of_all.ok, of_all.headline
    assert of_all.violated is None and len(of_all.steps) == len(served.outcomes)
    more = len(of_all.steps) - 1
    assert any(f"likewise in {more} more steps" in check.what for check in of_all.checks)
    assert {check.name for check in of_all.checks} >= {"oracle", "routing", "metamorphic"}


def test_rows_of_steps_are_each_row_of_the_whole_once() -> None:
    served = served_by(Ranks(options(chunk=3)))
    rows = torch.cat(rows_by_step(served))
    assert sorted(rows.tolist()) == list(range(15))
    whole = whole_of(served)
    for batch, of_step in zip(served.batches, rows_by_step(served), strict=True):
        assert torch.equal(whole.token_ids[of_step], batch.token_ids)
        assert torch.equal(whole.positions[of_step], batch.positions)


def at_one_row(step: int, name: str, row: int) -> Damage:
    def damage(now: int, rank: int, tap: str, value: torch.Tensor) -> torch.Tensor:
        if (now, tap) == (step, name):
            value[row] += 1
        return value

    return damage


def fails(checks: Sequence[Verdict], name: str) -> Verdict:
    (check,) = [check for check in checks if check.name == name]
    assert not check.ok
    return check


def test_the_first_wrong_step_is_named_with_request_position_and_layer() -> None:
    ranks = Ranks(options(), damage=at_one_row(2, "layers.1.attn", 1))
    of_all = judged(ranks, served_by(ranks))
    assert of_all.violated == 2 and of_all.steps == (True, True, False, True)
    verdict = of_all.headline
    assert verdict is not None and verdict.at == "layers.1.attn"
    assert verdict.where.startswith(
        "step 2: decode of request 0, decode of request 1; request 1, position 3; layers.1.attn"
    )
    # The taps are those of this step, so no other one is wrong.
    assert [tap.name for tap in of_all.taps if not tap.ok] == ["layers.1.attn"]


def test_in_a_chunk_the_positions_are_those_of_the_request() -> None:
    ranks = Ranks(options(chunk=3), damage=at_one_row(1, "layers.0.ffn", 2))
    of_all = judged(ranks, served_by(ranks))
    where = fails(of_all.checks, "oracle").where
    assert where.startswith("step 1: decode of request 1, 3 prompt tokens of request 0; request 0")
    assert "request 0, position 4;" in where


def test_a_step_that_breaks_ends_the_run_and_is_judged_until_there() -> None:
    ranks = Ranks(options(), breaks_at=2)
    served = served_by(ranks)
    assert len(served.outcomes) == 3 and not served.whole
    assert served.lengths == [9, 4]
    of_all = judged(ranks, served)
    assert of_all.violated == 2 and of_all.steps == (True, True, False)
    assert "step 2" in fails(of_all.checks, "ledger").where
    assert all(tap.ok for tap in of_all.taps)


def test_a_wrong_tap_of_a_broken_step_is_the_headline() -> None:
    ranks = Ranks(options(), breaks_at=1, damage=at_one_row(1, "layers.0.attn", 0))
    verdict = judged(ranks, served_by(ranks)).headline
    assert verdict is not None and verdict.at == "layers.0.attn"


def test_a_row_that_depends_on_another_request_is_found() -> None:
    """Within the bound, so that the oracle sees nothing; only the related steps tell."""

    class Leaky(Ranks):
        def _result(self, step, rank, taps):  # type: ignore[no-untyped-def]
            leak = self.tokens[1][-1] * 2e-8
            changed = {n: t + leak if n == "layers.1.attn" else t for n, t in taps.items()}
            return super()._result(step, rank, changed)

    ranks = Leaky(options())
    of_all = judged(ranks, served_by(ranks), related=True)
    assert fails(of_all.checks, "metamorphic").at == "layers.1.attn"
    assert [check.name for check in of_all.checks if not check.ok] == ["metamorphic"]


def test_logits_that_differ_between_ranks_are_told() -> None:
    def damage(step: int, rank: int, name: str, value: torch.Tensor) -> torch.Tensor:
        return value + 1 if (step, rank, name) == (1, 1, "logits") else value

    served = served_by(Ranks(options(), damage=damage))
    assert served.differ == [1] and served.whole


def test_logits_that_lack_rows_end_the_run() -> None:
    def damage(step: int, rank: int, name: str, value: torch.Tensor) -> torch.Tensor:
        return value[:1] if step == 0 and name == "logits" else value

    ranks = Ranks(options(), damage=damage)
    served = served_by(ranks)
    assert len(served.outcomes) == 1 and not served.whole
    assert fails(judged(ranks, served).checks, "oracle").at == "logits"


def test_seeded_sampling_differs_and_repeats() -> None:
    greedy = served_by(Ranks(options())).sampled
    one, two = (
        served_by(Ranks(options()), Sampling(seed=1, temperature=2.0)).sampled for _ in range(2)
    )
    assert one == two != greedy


def test_the_fake_does_no_damage_by_itself() -> None:
    value = torch.ones(2)
    assert unharmed(0, 0, "x", value) is value

"""The driver: steps a plan, feeds tokens, takes what comes out, and samples what is next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from model.batch import Batch
from rankfold.run import Outcome
from rankfold.serving.plan import Plan, Step
from rankfold.serving.sampling import Sampling
from sim.buffers import same_bits

RunStep = Callable[[Batch], Outcome]
"""Runs one step on all ranks; their KV caches stay for the next one."""


@dataclass(kw_only=True)
class Served:
    """What has become of some requests."""

    plan: Plan
    tokens: list[list[int]]
    """Of each request what was fed or is to be: its prompt and what follows."""
    sampled: list[list[int]]
    """Of each request the tokens that were sampled, the last of which is not fed."""
    prompt_logprobs: list[list[float]]
    """Of each request, for each prompt token but the first, the logprob that it was given."""
    logprobs: list[list[float]]
    """Of each request, the logprob of each sampled token."""
    batches: list[Batch] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the steps that ran; the last one may have broken."""
    differ: list[int] = field(default_factory=list)
    """Steps whose logits were not the same bits on all TP ranks of the last stage."""

    @property
    def steps(self) -> list[Step]:
        """The steps that ran."""
        return [*self.plan.steps[: len(self.outcomes)]]

    @property
    def whole(self) -> bool:
        """Whether every step came to its end."""
        return len(self.outcomes) == len(self.plan.steps) and self.outcomes[-1].broke is None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request that were fed."""
        fed = [0] * len(self.tokens)
        for step in self.steps:
            for part in step.parts:
                fed[part.request] = part.end
        return fed


def serve(
    run: RunStep, plan: Plan, tokens: Sequence[Sequence[int]], sampling: Sampling | None = None
) -> Served:
    """Run a plan's steps, until one breaks.

    Args:
        run: runs a step.
        plan: the steps.
        tokens: of each request at least its prompt. What is given beyond is fed as it is; what is
            missing is sampled.
        sampling: how tokens are sampled; without it all tokens have to be given.
    """
    served = Served(
        plan=plan,
        tokens=[list(of_request) for of_request in tokens],
        sampled=[[] for _ in tokens],
        prompt_logprobs=[[] for _ in tokens],
        logprobs=[[] for _ in tokens],
    )
    for number, step in enumerate(plan.steps):
        batch = _batch(step, served.tokens)
        outcome = run(batch)
        served.batches.append(batch)
        served.outcomes.append(outcome)
        if outcome.broke is not None:
            break
        of_ranks = [r for r in outcome.results if r.logits is not None and r.logprobs is not None]
        logits, logprobs = of_ranks[0].logits, of_ranks[0].logprobs
        assert logits is not None and logprobs is not None
        if any(r.logits is None or not same_bits(r.logits, logits) for r in of_ranks):
            served.differ.append(number)
        if logits.shape[0] < step.tokens:
            # A fault has lost rows; without them there is no next token.
            break
        _take(served, step, logits, logprobs, sampling)
    return served


def _batch(step: Step, tokens: Sequence[Sequence[int]]) -> Batch:
    ids = [t for p in step.parts for t in tokens[p.request][p.start : p.end]]
    return Batch.of(
        ids,
        [part.length for part in step.parts],
        context_lens=[part.start for part in step.parts],
        requests=[part.request for part in step.parts],
    )


def _take(
    served: Served,
    step: Step,
    logits: torch.Tensor,
    logprobs: torch.Tensor,
    sampling: Sampling | None,
) -> None:
    """Take prompt logprobs from a step, and sample the tokens that are next."""
    end = 0
    for part in step.parts:
        start, end = end, end + part.length
        fed, prompt = served.tokens[part.request], served.plan.prompts[part.request]
        for row, position in zip(range(start, end), range(part.start, part.end), strict=True):
            if position + 1 < prompt:
                value = float(logprobs[row, fed[position + 1]])
                served.prompt_logprobs[part.request].append(value)
        if sampling is not None and served.plan.samples(part):
            sampled = served.sampled[part.request]
            token = sampling.sample(part.request, len(sampled), logits[end - 1])
            sampled.append(token)
            served.logprobs[part.request].append(float(logprobs[end - 1, token]))
            if len(fed) < served.plan.lengths[part.request]:
                fed.append(token)

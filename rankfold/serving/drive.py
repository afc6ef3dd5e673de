"""The driver: steps a plan, feeds tokens, takes what comes out, and samples what is next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from model.batch import Batch
from rankfold.run import Outcome
from rankfold.serving.plan import Part, Plan, Step
from rankfold.serving.sampling import Sampling
from sim.buffers import same_bits


@dataclass(kw_only=True, eq=False)
class Record:
    """A request on its way: what is fed of it, and what came of it."""

    request: int
    """Its index."""
    prompt: int
    """Tokens of its prompt."""
    goal: int
    """Tokens that are fed in all."""
    tokens: list[int]
    """What was fed or is to be: its prompt and what follows."""
    sampled: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """For each prompt token but the first, the logprob that it was given."""
    logprobs: list[float] = field(default_factory=list)
    """Of each sampled token."""

    def take(
        self, part: Part, logits: torch.Tensor, logprobs: torch.Tensor, sampling: Sampling | None
    ) -> None:
        """Take the prompt's logprobs from a part of it, and sample the token that is next.

        Args:
            part: of this request.
            logits, logprobs: its rows of the step, [length, V].
            sampling: None samples nothing.
        """
        for row, position in enumerate(range(part.start, part.end)):
            if position + 1 < self.prompt:
                self.prompt_logprobs.append(float(logprobs[row, self.tokens[position + 1]]))
        if sampling is not None and part.end >= self.prompt:
            token = sampling.sample(self.request, len(self.sampled), logits[-1])
            self.sampled.append(token)
            self.logprobs.append(float(logprobs[-1, token]))
            if len(self.tokens) < self.goal:
                self.tokens.append(token)


RunStep = Callable[[Batch], Outcome]
"""Runs one step on all ranks; their KV caches stay for the next one."""

Records = Sequence[Record] | Mapping[int, Record]
"""By the request's number in the step's parts."""


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
    records = [
        Record(request=request, prompt=prompt, goal=length, tokens=list(of_request))
        for request, (prompt, length, of_request) in enumerate(
            zip(plan.prompts, plan.lengths, tokens, strict=True)
        )
    ]
    served = Served(
        plan=plan,
        tokens=[record.tokens for record in records],
        sampled=[record.sampled for record in records],
        prompt_logprobs=[record.prompt_logprobs for record in records],
        logprobs=[record.logprobs for record in records],
    )
    for number, step in enumerate(plan.steps):
        batch = batch_of_step(step, records)
        outcome = run(batch)
        served.batches.append(batch)
        served.outcomes.append(outcome)
        if outcome.broke is not None:
            break
        logits = outcome.logits
        of_ranks = [result.logits for result in outcome.results if result.logits is not None]
        if not all(same_bits(of_rank, logits) for of_rank in of_ranks):
            served.differ.append(number)
        if not take_step(step, outcome, records, sampling):
            break
    return served


def batch_of_step(step: Step, records: Records, slots: Mapping[int, int] | None = None) -> Batch:
    """A step's batch.

    slots: which request of the caches each is; as they are numbered by default.
    """
    parts = step.parts
    return Batch.of(
        [t for p in parts for t in records[p.request].tokens[p.start : p.end]],
        [part.length for part in parts],
        context_lens=[part.start for part in parts],
        requests=[slots[p.request] if slots else p.request for p in parts],
    )


def take_step(step: Step, outcome: Outcome, records: Records, sampling: Sampling | None) -> bool:
    """Take what came of a step that has come to its end. False if a fault has lost rows: without
    them there is no next token."""
    logits, logprobs = outcome.logits, outcome.logprobs
    if logits.shape[0] < step.tokens:
        return False
    end = 0
    for part in step.parts:
        start, end = end, end + part.length
        records[part.request].take(part, logits[start:end], logprobs[start:end], sampling)
    return True

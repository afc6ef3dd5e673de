"""The plan: which request brings how many tokens into which step.

As vLLM's scheduler would: every step takes from each request what is next, a chunk of its prompt
or one token to decode, in the order of the requests, as long as the step has room. Lengths alone
decide, never the tokens, so the whole plan is known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankfold.errors import UsageError
from rankfold.options import MOST_TOKENS


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one request brings into one step."""

    request: int
    """Its index."""
    start: int
    """Tokens of it that the caches hold already."""
    length: int
    """New tokens, one or more."""

    @property
    def end(self) -> int:
        """Tokens of it that the caches hold after the step."""
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. Invariant: parts of one token come first, as vLLM orders a batch, and no request
    is in it twice."""

    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return sum(part.length for part in self.parts)

    def rows(self) -> list[tuple[int, int]]:
        """The (request, position) of each row."""
        return [(p.request, at) for p in self.parts for at in range(p.start, p.end)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All steps of some requests."""

    lengths: tuple[int, ...]
    """Tokens of each request that are fed in all."""
    prompts: tuple[int, ...]
    """Of these the ones of its prompt."""
    steps: tuple[Step, ...]
    names: tuple[str, ...] = ()
    """What the requests are called, if not by their numbers."""

    def name(self, request: int) -> str:
        """A request in words."""
        return self.names[request] if self.names else f"request {request}"

    def is_decode(self, part: Part) -> bool:
        """Whether a part is a token that was sampled before."""
        return part.start >= self.prompts[part.request]

    def samples(self, part: Part) -> bool:
        """Whether the token after a part's last one is to be sampled."""
        return part.end >= self.prompts[part.request]

    def describe(self, number: int) -> str:
        """A step in a few words, such as "step 3: 8 tokens of request 0, decode of request 1"."""
        said = [
            f"decode of {self.name(part.request)}"
            if self.is_decode(part)
            else f"{part.length} prompt tokens of {self.name(part.request)}"
            for part in self.steps[number].parts
        ]
        return f"step {number}: {', '.join(said)}"


def plan_of(
    prompts: Sequence[int],
    decode: Sequence[int],
    *,
    chunk: int = 0,
    most_tokens: int = MOST_TOKENS,
) -> Plan:
    """The plan of requests.

    Args:
        prompts: tokens of each prompt, one or more.
        decode: steps of one token after each.
        chunk: most prompt tokens of a request in a step; 0 is all that the step has room for.
        most_tokens: of a step.

    Raises:
        UsageError: a number makes no sense.
    """
    if chunk < 0:
        raise UsageError(f"--chunk {chunk}: use 1 or more tokens, or 0 for whole prompts")
    if most_tokens < 1:
        raise UsageError(f"steps of at most {most_tokens} tokens: use 1 or more")
    if min(prompts, default=1) < 1 or min(decode, default=0) < 0:
        raise UsageError("every request needs a prompt of one token or more")
    lengths = tuple(p + d for p, d in zip(prompts, decode, strict=True))
    done = [0] * len(lengths)
    steps: list[Step] = []
    while any(have < all_ for have, all_ in zip(done, lengths, strict=True)):
        fed = zip(range(len(lengths)), done, prompts, lengths, strict=True)
        step = next_step(fed, chunk, most_tokens)
        for part in step.parts:
            done[part.request] = part.end
        steps.append(step)
    return Plan(lengths=lengths, prompts=tuple(prompts), steps=tuple(steps))


def next_step(
    fed: Iterable[tuple[int, int, int, int]], chunk: int, most_tokens: int = MOST_TOKENS
) -> Step:
    """What is next of each request, as long as the step has room.

    Args:
        fed: of each request its number, and how many tokens were fed, its prompt has, and it has in
            all.
        chunk, most_tokens: as in `plan_of`.
    """
    room, parts = most_tokens, []
    for request, have, prompt, all_ in fed:
        left = prompt - have
        next_ = min(left, chunk or left) if left > 0 else min(1, all_ - have)
        if (length := min(next_, room)) > 0:
            parts.append(Part(request=request, start=have, length=length))
            room -= length
    parts.sort(key=lambda part: part.length != 1)
    return Step(parts=tuple(parts))


def decode_first(lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths of sequences as vLLM orders a batch: those of one token first."""
    return tuple(sorted(lengths, key=lambda length: length != 1))

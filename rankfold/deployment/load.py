"""A synthetic load: requests of mixed lengths from a seed."""

from __future__ import annotations

import torch

from model.tiny import TinyM3
from rankfold.errors import UsageError
from rankfold.serving.request import Request

MOST_REQUESTS = 256
MOST_DECODE = 64


def mixed_load(
    count: int, decode: int, tiny: TinyM3, seed: int, *, even: bool = False
) -> tuple[Request, ...]:
    """Requests with prompts of one token to some blocks more than sparse attention keeps, and up
    to so many decode steps after each. The same arguments give the same on every machine.

    even: whether each has exactly so many decode steps.

    Raises:
        UsageError: a number makes no sense.
    """
    if not 1 <= count <= MOST_REQUESTS:
        raise UsageError(f"--requests {count}: use 1 to {MOST_REQUESTS}")
    if not 0 <= decode <= MOST_DECODE:
        raise UsageError(f"--decode {decode}: use 0 to {MOST_DECODE}")
    block = tiny.sparse_block_size
    longest = (tiny.sparse_topk_blocks + 3) * block
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high + 1, (size,), generator=generator).tolist()

    made, low = [], decode if even else min(1, decode)
    for number in range(count):
        # Some of the shortest and longest are always there, where there are requests enough.
        length = {3: 1, 6: longest}.get(number % 8) or draw(1, longest)[0]
        prompt = tuple(draw(0, tiny.vocab_size - 1, length))
        made.append(Request(prompt=prompt, decode=draw(low, decode)[0]))
    return tuple(made)

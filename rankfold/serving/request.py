"""Requests, and requests of telling lengths from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.tiny import TinyM3
from rankfold.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how many decode steps follow it."""

    prompt: tuple[int, ...]
    """Token ids."""
    decode: int = 0
    """Steps after the prompt, each of which brings the token that was sampled last."""

    @property
    def length(self) -> int:
        """Tokens in all that the caches hold at the end: the last sampled token is not fed."""
        return len(self.prompt) + self.decode

    def check(self, tiny: TinyM3) -> None:
        """Raise UsageError, in one line, if the model cannot take it."""
        if not self.prompt:
            raise UsageError("an empty prompt: give one token id or more")
        if self.decode < 0:
            raise UsageError(f"{self.decode} decode steps: use 0 or more")
        wrong = [token for token in self.prompt if not 0 <= token < tiny.vocab_size]
        if wrong:
            raise UsageError(f"token id {wrong[0]}: use 0 to {tiny.vocab_size - 1}")
        if self.length > tiny.max_position_embeddings:
            raise UsageError(
                f"{len(self.prompt)} prompt tokens and {self.decode} decode steps: the model has "
                f"{tiny.max_position_embeddings} positions"
            )


def lengths_of(count: int, tiny: TinyM3, seed: int) -> tuple[int, ...]:
    """Prompt lengths, all different: the first drops blocks, the second is shorter than a block,
    the third fills some blocks and drops none, and further ones are any.

    Drops blocks: it is longer than the blocks that a token attends to in a sparse layer.
    """
    block, kept = tiny.sparse_block_size, tiny.sparse_topk_blocks * tiny.sparse_block_size
    generator = torch.Generator().manual_seed(seed)
    scopes = [
        range(kept + block + 1, kept + 3 * block),
        range(1, block),
        range(block + 1, kept),
        *[range(1, kept + 3 * block)] * max(0, count - 3),
    ]
    chosen: list[int] = []
    for scope in scopes[:count]:
        left = [length for length in scope if length not in chosen]
        chosen.append(left[int(torch.randint(len(left), (), generator=generator))])
    return tuple(chosen)


def requests_of(
    token_ids: Sequence[int], lengths: Sequence[int], decode: int
) -> tuple[Request, ...]:
    """Requests whose prompts lie one after another in `token_ids`."""
    made, start = [], 0
    for length in lengths:
        prompt = tuple(token_ids[start : start + length])
        made.append(Request(prompt=prompt, decode=decode))
        start += length
    return tuple(made)

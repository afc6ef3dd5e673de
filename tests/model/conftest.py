"""Fixtures for the model's tests: vLLM prepared once, and folded runs remembered by their case."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject, prepare
from model.tiny import TinyM3
from sim import RankContext, World

Fold = Callable[..., list[StepResult]]


@dataclass(frozen=True, kw_only=True)
class _Case:
    word: str
    tiny: TinyM3
    dtype: torch.dtype
    tokens: int
    sequences: int
    seed: int


@pytest.fixture(scope="session")
def vllm_ready() -> None:
    """vLLM's MiniMax-M3 imported, and the override table installed."""
    prepare()


@pytest.fixture(scope="session")
def fold(vllm_ready: None) -> Fold:
    """fold("tp2pp2", tokens=8, ...) -> one step's results by rank, run once for each case."""
    done: dict[_Case, list[StepResult]] = {}

    def run(
        word: str,
        *,
        tiny: TinyM3 | None = None,
        dtype: torch.dtype = torch.float32,
        tokens: int = 8,
        sequences: int = 2,
        seed: int = 0,
    ) -> list[StepResult]:
        tiny = tiny or TinyM3()
        case = _Case(
            word=word, tiny=tiny, dtype=dtype, tokens=tokens, sequences=sequences, seed=seed
        )
        if case not in done:
            weights = checkpoint(tiny, seed, dtype)
            batch = Batch.random(tokens, tiny.vocab_size, seed, sequences)

            def program(ctx: RankContext) -> StepResult:
                return Subject(ctx, tiny, weights, dtype).step(batch)

            with World(word, rank_local=RANK_LOCAL) as world:
                done[case] = world.run(program)
        return done[case]

    return run

"""Steps the subject on folded worlds that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.megamoe.tiny import MegaTinyM3, quantise_experts
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject
from model.tiny import TinyM3
from sim import World

MEGA = MegaTinyM3(layers="dmm")
MXFP8 = MegaTinyM3(layers="dm", expert_dtype="mxfp8")
PLAIN = TinyM3(layers="dmm")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A world with its models, which steps any batch."""

    word: str
    tiny: TinyM3
    world: World
    subjects: list[Subject]

    def step(self, batch: Batch) -> list[StepResult]:
        """Each rank's result."""
        return self.world.run(lambda ctx: self.subjects[ctx.rank].step(batch))

    def random(self, tokens: int, sequences: int = 1, seed: int = 0) -> Batch:
        return Batch.random(tokens, self.tiny.vocab_size, seed, sequences)


@contextmanager
def built(
    word: str, tiny: TinyM3 = PLAIN, *, sp: bool = True, aux: Sequence[int] = ()
) -> Iterator[Built]:
    """Models of random weights: bfloat16 on MegaMoE for a `MegaTinyM3`, else float32."""
    mega = isinstance(tiny, MegaTinyM3)
    dtype = torch.bfloat16 if mega else torch.float32
    weights = checkpoint(tiny, 0, dtype)
    if isinstance(tiny, MegaTinyM3) and tiny.expert_dtype == "mxfp8":
        weights = quantise_experts(weights)
    backend = "deep_gemm_mega_moe" if mega else "auto"

    def build(ctx: Any) -> Subject:
        return Subject(
            ctx,
            tiny,
            weights,
            dtype,
            moe_backend=backend,
            sequence_parallel=sp,
            aux=tuple(aux),
        )

    with World(word, rank_local=RANK_LOCAL) as world:
        yield Built(word=word, tiny=tiny, world=world, subjects=world.run(build))


@dataclass
class Shared:
    """Worlds kept open between the tests of a module."""

    worlds: dict[Any, tuple[Any, Built]] = field(default_factory=dict)

    def of(self, word: str, tiny: TinyM3 = PLAIN, **options: Any) -> Built:
        key = (word, tiny, tuple(sorted(options.items())))
        if key not in self.worlds:
            manager = built(word, tiny, **options)
            self.worlds[key] = manager, manager.__enter__()
        return self.worlds[key][1]

    def close(self) -> None:
        for manager, _ in self.worlds.values():
            manager.__exit__(None, None, None)

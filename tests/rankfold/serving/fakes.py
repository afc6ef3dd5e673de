"""Ranks that are the reference itself: they remember tokens, not keys, and run whole sequences.

So the driver, the truth and the judge are tested without vLLM, and a fault can be put at any tap of
any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import reference
from model.batch import Batch
from model.checkpoint import checkpoint
from model.subject import StepResult
from model.taps import Captured
from rankfold.options import Options
from rankfold.run import Outcome
from sim import Deadlock, Ledger

Damage = Callable[[int, int, str, torch.Tensor], torch.Tensor]
"""From step, rank, tap and its value to the value that the rank has."""

FACTS = {"vllm": "none", "model": "a fake", "sequence_parallel": False, "moe_backend": "none"}


def unharmed(step: int, rank: int, name: str, value: torch.Tensor) -> torch.Tensor:
    return value


@dataclass
class Ranks:
    """Runs steps as `Rig.step` does; all taps are replicated."""

    options: Options
    damage: Damage = unharmed
    breaks_at: int | None = None
    """A step that breaks, after layer 0."""
    steps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tiny = self.options.tiny
        self.weights = checkpoint(tiny, self.options.seed, torch.float32)
        self.config = reference.M3Config.from_hf(tiny.text_config())
        plain = {name.removeprefix("model."): value for name, value in self.weights.items()}
        self.plain = reference.as_float64(self.config, plain)

    def step(self, batch: Batch) -> Outcome:
        new = iter(batch.token_ids.tolist())
        kept: list[int] = []
        lengths: list[int] = []
        for request, context, count in zip(
            batch.requests, batch.context_lens, batch.seq_lens, strict=True
        ):
            before = [] if context == 0 else self.tokens[request]
            assert len(before) == context, "the caches hold something else"
            self.tokens[request] = before + [next(new) for _ in range(count)]
            kept += range(sum(lengths) + context, sum(lengths) + context + count)
            lengths.append(context + count)
        fed = [t for request in batch.requests for t in self.tokens[request]]
        whole = Batch.of(fed, lengths)
        run = reference.forward(
            self.config,
            self.plain,
            reference.Batch(
                token_ids=whole.token_ids, positions=whole.positions, seq_lens=whole.seq_lens
            ),
        )
        number, self.steps = self.steps, self.steps + 1
        results = [
            self._result(number, rank, {name: tap[kept] for name, tap in run.taps.items()})
            for rank in range(self.options.topology.tp)
        ]
        broke = Deadlock("deadlock: nobody comes") if number == self.breaks_at else None
        return Outcome(
            topology=self.options.topology,
            results=results,
            ledger=Ledger(),
            facts=FACTS,
            broke=broke,
            findings=(),
        )

    def _result(self, step: int, rank: int, taps: dict[str, torch.Tensor]) -> StepResult:
        captured = {}
        for name, tap in taps.items():
            if step == self.breaks_at and name.startswith("layers.1"):
                return StepResult(stage=0, taps=captured)
            value = tap.float() if tap.is_floating_point() else tap
            value = self.damage(step, rank, name, value.clone())
            captured[name] = Captured(name=name, value=value, declared="replicate")
        return StepResult(
            stage=0,
            taps=captured,
            logits=captured["logits"].value,
            logprobs=captured["logprobs"].value,
        )

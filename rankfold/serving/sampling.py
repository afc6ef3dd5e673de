"""The next token from a row of logits, greedy or seeded.

Sampling is done once, outside of the ranks, as vLLM's scheduler does that feeds tokens back to all
stages. A draw depends on the seed, the request and how many tokens it has sampled, and on nothing
else: so requests do not disturb each other, and every topology draws alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rankfold.errors import UsageError

_STRIDE = 1_000_003
"""Keeps the seeds of requests and tokens apart."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled."""

    seed: int | None = None
    """None is greedy: the largest logit, the first of equal ones."""
    temperature: float = 1.0
    """Of seeded sampling: logits are divided by it."""

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise UsageError(f"--seed-sampling {self.seed}: use 0 to 2^31 - 1")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature:g}: use a positive number")

    def scores(self, request: int, count: int, logits: torch.Tensor) -> torch.Tensor:
        """What the sampled token is the largest of: the logits, for seeded sampling with noise.

        The noise is Gumbel's, times the temperature: its largest sum with the logits has the
        probabilities of their softmax (Gumbel 1954). Rounding of logits moves scores no further.

        Args:
            request: its index.
            count: tokens that it has sampled already.
            logits: [V].

        Returns:
            float64 [V]. Logits that are no numbers come from a fault and count as the lowest, so
            that the run can go on and be judged.
        """
        row = logits.double().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        if self.seed is None:
            return row
        number = (self.seed * _STRIDE + request) * _STRIDE + count
        generator = torch.Generator().manual_seed(number % 2**63)
        draws = torch.rand(row.shape, generator=generator, dtype=torch.float64)
        gumbel = -(-draws.clamp_min(torch.finfo(torch.float64).tiny).log()).log()
        return row + self.temperature * gumbel

    def sample(self, request: int, count: int, logits: torch.Tensor) -> int:
        """The next token of a request; see `scores`."""
        return int(self.scores(request, count, logits).argmax())

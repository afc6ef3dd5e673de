"""One step's input: the tokens of one or more whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Tokens of sequences laid out one after another; every rank gets the same batch.

    Invariant: the lengths sum to the number of tokens.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], the position of each token in its sequence."""
    seq_lens: tuple[int, ...]
    """Tokens of each sequence, in order; zero is allowed."""

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape[0]
        if self.positions.shape != self.token_ids.shape:
            raise ValueError(
                f"{tokens} token ids need {tokens} positions, not {self.positions.shape[0]}"
            )
        if any(length < 0 for length in self.seq_lens) or sum(self.seq_lens) != tokens:
            raise ValueError(f"seq_lens {self.seq_lens} must sum to the {tokens} tokens")

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.token_ids.shape[0])

    @classmethod
    def of(cls, token_ids: Sequence[int] | torch.Tensor, seq_lens: Sequence[int]) -> "Batch":
        """Sequences of the given lengths, each with positions from 0."""
        positions = [torch.arange(length) for length in seq_lens]
        return cls(
            token_ids=torch.as_tensor(token_ids, dtype=torch.int64),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            seq_lens=tuple(seq_lens),
        )

    @classmethod
    def random(cls, tokens: int, vocab: int, seed: int, sequences: int = 1) -> "Batch":
        """`tokens` random ids below `vocab`, cut into sequences as equal as can be, longest first.

        The same arguments give the same batch on every machine.
        """
        if tokens < 0 or sequences < 1:
            raise ValueError(
                f"{tokens} tokens in {sequences} sequences: tokens must be 0 or more, "
                "sequences 1 or more"
            )
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(vocab, (tokens,), generator=generator)
        shorter, longer = divmod(tokens, sequences)
        return cls.of(token_ids, [shorter + (i < longer) for i in range(sequences)])

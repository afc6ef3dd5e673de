"""One step's input: the next tokens of one or more sequences.

Most steps bring whole sequences. A long prompt may come in chunks, and decoding brings one token
at a time: then the KV caches hold the earlier tokens, and the batch says how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """New tokens of sequences laid out one after another; every rank gets the same batch.

    Invariant: the lengths sum to the number of tokens, and no request is there twice.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], the position of each token in its sequence."""
    seq_lens: tuple[int, ...]
    """New tokens of each sequence, in order; zero is allowed."""
    context_lens: tuple[int, ...] = ()
    """Tokens of each sequence that the KV caches hold already; 0 each by default, which begins a
    sequence anew."""
    requests: tuple[int, ...] = ()
    """Which request each sequence is, as the KV caches count them; 0, 1, ... by default."""

    def __post_init__(self) -> None:
        for name, default in (
            ("context_lens", (0,) * len(self.seq_lens)),
            ("requests", tuple(range(len(self.seq_lens)))),
        ):
            given = getattr(self, name) or default
            object.__setattr__(self, name, given)
            if len(given) != len(self.seq_lens):
                raise ValueError(
                    f"{len(given)} {name} for {len(self.seq_lens)} sequences: give one each"
                )
            if any(number < 0 for number in given):
                raise ValueError(f"{name} {given}: no number may be below 0")
        if len(set(self.requests)) < len(self.requests):
            raise ValueError(f"requests {self.requests}: each may be there once")
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
    def of(
        cls,
        token_ids: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int],
        context_lens: Sequence[int] | None = None,
        requests: Sequence[int] | None = None,
    ) -> "Batch":
        """Sequences that bring so many tokens, each with positions from its context on."""
        contexts = [0] * len(seq_lens) if context_lens is None else context_lens
        positions = [
            torch.arange(context, context + length)
            for context, length in zip(contexts, seq_lens, strict=True)
        ]
        return cls(
            token_ids=torch.as_tensor(token_ids, dtype=torch.int64),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            seq_lens=tuple(seq_lens),
            context_lens=tuple(contexts),
            requests=tuple(requests or ()),
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

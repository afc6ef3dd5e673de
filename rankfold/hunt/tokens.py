"""Which tokens an example has: how many sequences of which lengths, on which DP ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from rankfold.corpus import LENGTHS, batch_of
from rankfold.options import MEGA_MOE, Options
from sim import Topology


def laid(by_rank: Sequence[tuple[int, ...]], vocab: int) -> dict[str, Any]:
    """The fields of an example that say which tokens the DP ranks have, by their sequences."""
    return {
        "token_ids": tuple(
            token
            for dp_rank, seq_lens in enumerate(by_rank)
            for token in batch_of(seq_lens, vocab, dp_rank)
        ),
        "seq_lens": tuple(length for seq_lens in by_rank for length in seq_lens),
        "dp_seqs": tuple(map(len, by_rank)) if len(by_rank) > 1 else (),
    }


def spread(draw: st.DrawFn, tokens: int, ranks: int) -> list[int]:
    """How many of the tokens each DP rank has: cut anywhere, so that some have none, or even."""
    if ranks == 1:
        return [tokens]
    if draw(st.booleans()):
        return [tokens // ranks] * ranks
    places = st.lists(st.integers(0, tokens), min_size=ranks - 1, max_size=ranks - 1)
    ends = [0, *sorted(draw(places)), tokens]
    return [end - start for start, end in pairwise(ends)]


def cut(draw: st.DrawFn, tokens: int) -> tuple[int, ...]:
    """Lengths of sequences of at least one token each, or of one empty sequence."""
    most = min(len(LENGTHS), max(1, tokens))
    count = draw(st.integers(1, most))
    if count == 1:
        return (tokens,)
    cuts = draw(
        st.lists(st.integers(1, tokens - 1), min_size=count - 1, max_size=count - 1, unique=True)
    )
    ends = [0, *sorted(cuts), tokens]
    return tuple(ends[i + 1] - ends[i] for i in range(count))


@functools.cache
def vocabulary(mega: bool) -> int:
    """Token ids of the tiny model."""
    backend = MEGA_MOE if mega else "auto"
    word = "tep2" if mega else "tp1"
    return Options(topology=Topology.parse(word), moe_backend=backend).tiny.vocab_size

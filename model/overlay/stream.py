"""The exchanges of a stream that is sharded by token over the TP ranks.

A shard is `ceil(T / TP)` rows; the pad rows that this makes are the last of the last shards. They
are cut off wherever all tokens come together, so that none meets a real row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from vllm.forward_context import get_forward_context
from vllm.models.common.ops.sequence_parallel import sp_all_gather, sp_padding_mask


def gather_tokens(shard: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """All tokens of a shard: [ceil(T / TP), H] -> [T, H], equal on all TP ranks."""
    return sp_all_gather(shard)[:num_tokens]


def gather_packed(shards: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    """`gather_tokens` of several shards of one shape and dtype, in one exchange.

    Returns contiguous tensors: transports and kernels expect such.
    """
    if len(shards) == 1:
        return [gather_tokens(shards[0], num_tokens)]
    packed = gather_tokens(torch.cat(list(shards), dim=-1), num_tokens)
    return [part.contiguous() for part in packed.chunk(len(shards), dim=-1)]


@contextmanager
def sharded_padding_mask(
    tokens: torch.Tensor, is_padding: torch.Tensor | None = None
) -> Iterator[None]:
    """Within, the forward context's padding mask is that of this rank's shard.

    It is bool [ceil(T / TP)], True for rows that the model runner marked as no tokens and for those
    that sharding added: vLLM's router and experts send such rows to no expert. They would take the
    whole mask's first rows for those of their input. It comes back at the end: later forward
    passes of the same context shard it anew.

    tokens: [T, ...], for the number of tokens and the device. is_padding: bool [T], the whole mask
    where it is not the context's.
    """
    context = get_forward_context()
    whole = context.is_padding
    context.is_padding = sp_padding_mask(whole if is_padding is None else is_padding, tokens)
    try:
        yield
    finally:
        context.is_padding = whole

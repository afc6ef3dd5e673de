"""Fills the pad rows of a token-sharded stream with NaN wherever sharding makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch


@contextmanager
def pads_are_nan() -> Iterator[list[int]]:
    """Within, shards and reduce-scattered sums have NaN in the rows beyond the last token.

    Yields a list that grows by the number of rows filled, call by call; enter it on the main
    thread before a world starts.
    """
    from model.overlay import layers, model

    filled: list[int] = []

    def poisoned(shard: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(whole: torch.Tensor) -> torch.Tensor:
            from vllm.distributed import get_tensor_model_parallel_rank as tp_rank

            part = shard(whole).clone()
            real = max(0, min(part.shape[0], whole.shape[0] - tp_rank() * part.shape[0]))
            part[real:] = torch.nan
            filled.append(part.shape[0] - real)
            return part

        return run

    with ExitStack() as stack:
        for module, name in [
            (model, "sp_shard"),
            (layers, "sp_shard"),
            (layers, "sp_reduce_scatter"),
        ]:
            made = poisoned(getattr(module, name))
            stack.enter_context(patch.object(module, name, made))
        yield filled
